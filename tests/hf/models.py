"""Tiny random models of every supported family, and the twin of one that is accelerated."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from tightfit.hf import accelerate

VOCABULARY = 97
IMAGE_TOKEN = 96
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "output_router_logits": True}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 10,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "projection_dim": 32,
    "vision_use_head": False,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **TEXT, "head_dim": 8},
    "mistral": {"model_type": "mistral", **TEXT, "head_dim": 8, "sliding_window": 6},
    "mixtral": {"model_type": "mixtral", **TEXT, "num_local_experts": 4, "output_router_logits": True},
    "qwen2": {"model_type": "qwen2", **TEXT},
    "qwen2_moe": {"model_type": "qwen2_moe", **TEXT, **ROUTED, "shared_expert_intermediate_size": 40},
    "qwen3": {"model_type": "qwen3", **TEXT, "head_dim": 8, "tie_word_embeddings": True},
    "qwen3_moe": {"model_type": "qwen3_moe", **TEXT, **ROUTED, "head_dim": 8, "mlp_only_layers": [0]},
    "olmoe": {"model_type": "olmoe", **TEXT, "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    "deepseek_v2": {"model_type": "deepseek_v2", **TEXT, **LATENT},
    "deepseek_v3": {"model_type": "deepseek_v3", **TEXT, **LATENT, "n_group": 2, "topk_group": 1},
    "gemma": {"model_type": "gemma", **TEXT, "head_dim": 8},
    "gemma2": {"model_type": "gemma2", **TEXT, "head_dim": 8, "sliding_window": 6, "final_logit_softcapping": 0.5},
    "gemma3": {"model_type": "gemma3_text", **TEXT, "head_dim": 8, "sliding_window": 6, "final_logit_softcapping": 0.5},
    "phi3": {"model_type": "phi3", **TEXT},
    "phi4-mini": {
        "model_type": "phi3",
        **TEXT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
    },
    "paligemma": {
        "model_type": "paligemma",
        "text_config": {"model_type": "gemma", **TEXT, "head_dim": 8},
        "vision_config": VISION,
        "projection_dim": 32,
        "image_token_index": IMAGE_TOKEN,
    },
    "gemma3-images": {
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", **TEXT, "head_dim": 8},
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE_TOKEN,
        "boi_token_index": 94,
        "eoi_token_index": 95,
    },
}
FAMILIES = list(CONFIGS)
WITH_IMAGES = ("paligemma", "gemma3-images")


def make_model(family: str, seed: int = 0) -> PreTrainedModel:
    """A small model with weights large enough for every part of it to matter."""
    torch.manual_seed(seed)
    auto = AutoModelForImageTextToText if family in WITH_IMAGES else AutoModelForCausalLM
    model = auto.from_config(make_config(family), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def make_config(family: str) -> Any:
    """Its config."""
    return AutoConfig.for_model(**copy.deepcopy(CONFIGS[family]))


def make_twins(family: str, **options: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Two models with the same weights, the second accelerated."""
    plain = make_model(family)
    return plain, accelerate(copy.deepcopy(plain), **options)


def make_batch(family: str, seed: int = 1, batch: int = 2, length: int = 13) -> dict[str, Tensor]:
    """Random tokens, with padding and labels that do not count; four of them an image where the family has images."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 90, (batch, length), generator=generator)
    made = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    made["attention_mask"][0, -2:] = 0
    if family in WITH_IMAGES:
        tokens[:, 1:5] = IMAGE_TOKEN
        made["pixel_values"] = torch.randn(batch, 3, 8, 8, generator=generator)
        made["token_type_ids"] = (tokens == IMAGE_TOKEN).long()
    labels = tokens.masked_fill((made["attention_mask"] == 0) | (tokens == IMAGE_TOKEN), -100)
    return {**made, "labels": labels}


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of every gradient."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
