"""The table of small models compared with transformers, and both sides of each comparison, built once.

Each case is a config.json; transformers' own config class and ours read the same dictionary. Windows, caps and trained
lengths are chosen so that a sequence of `LENGTH` tokens runs into them, and every parameter is random, norms and biases
included, so that nothing agrees by being zero or one.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from tightfit.models.decoder import Decoder
from tightfit.models.huggingface.config import spec_from_config
from tightfit.models.huggingface.weights import SINGLE_FILE, load_weights

LENGTH = 24
CORRECTION = "e_score_correction_bias"
BATCH = 2
Config = dict[str, Any]

_BASE: Config = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LLAMA = _BASE | {"model_type": "llama"}
_QWEN2_MOE = _BASE | {
    "model_type": "qwen2_moe",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
}
_GPT_OSS = _BASE | {
    "model_type": "gpt_oss",
    "head_dim": 12,
    "intermediate_size": 20,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 7,
    "hidden_act": "silu",
}
_DEEPSEEK = _BASE | {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "kv_lora_rank": 10,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_nextn_predict_layers": 0,
}
_DEEPSEEK_V2 = _DEEPSEEK | {"model_type": "deepseek_v2", "routed_scaling_factor": 1.7}
_DEEPSEEK_V3 = _DEEPSEEK | {"model_type": "deepseek_v3", "routed_scaling_factor": 2.5}
_GEMMA = _BASE | {"head_dim": 12, "num_hidden_layers": 3, "sliding_window": 7}
_GEMMA2 = _GEMMA | {
    "model_type": "gemma2",
    "query_pre_attn_scalar": 20,
    "attn_logit_softcapping": 0.6,
    "final_logit_softcapping": 0.8,
}
_GEMMA3 = _GEMMA | {"model_type": "gemma3_text", "query_pre_attn_scalar": 20, "sliding_window_pattern": 3}
_PHI3 = _BASE | {"model_type": "phi3"}
_GPT2: Config = {
    "model_type": "gpt2",
    "vocab_size": 61,
    "n_positions": 40,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _scaled(kind: str, **constants: Any) -> Config:
    return {"rope_scaling": {"rope_type": kind, **constants}}


def _longrope(pairs: int, trained: int) -> Config:
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(pairs)], "long_factor": [2.0 + i for i in range(pairs)]}
    return {"original_max_position_embeddings": trained, **_scaled("longrope", **factors)}


CASES: dict[str, Config] = {
    "llama": _LLAMA,
    "llama-biases": _LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama-tied-wide-heads": _LLAMA | {"tie_word_embeddings": True, "head_dim": 20},
    "llama-no-groups": _LLAMA | {"num_key_value_heads": 4},
    "llama-linear": _LLAMA | _scaled("linear", factor=3.0),
    "llama-dynamic-within": _LLAMA | _scaled("dynamic", factor=3.0),
    "llama-dynamic-beyond": _LLAMA | _scaled("dynamic", factor=3.0) | {"max_position_embeddings": 10},
    "llama-yarn": _LLAMA | _scaled("yarn", factor=4.0, original_max_position_embeddings=16),
    "llama-yarn-constants": _LLAMA
    | _scaled("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8.0, beta_slow=2.0, truncate=False)
    | {"rope_theta": 500.0},
    "llama-yarn-mscale": _LLAMA
    | _scaled("yarn", factor=8.0, original_max_position_embeddings=8, mscale=0.7, mscale_all_dim=1.3),
    "llama-yarn-temperature": _LLAMA
    | _scaled("yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=0.9),
    "llama3": _LLAMA
    | _scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
    | {"rope_theta": 100.0},
    "llama-new-style": _LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 333.0}},
    "mistral": _BASE | {"model_type": "mistral", "sliding_window": 7},
    "mistral-unwindowed": _BASE | {"model_type": "mistral", "sliding_window": None, "head_dim": 10},
    "mixtral": _BASE | {"model_type": "mixtral", "num_local_experts": 5, "sliding_window": 7},
    "qwen2": _BASE | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-windowed": _BASE
    | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen2_moe": _QWEN2_MOE,
    "qwen2_moe-normed": _QWEN2_MOE
    | {"norm_topk_prob": True, "qkv_bias": False, "decoder_sparse_step": 2, "mlp_only_layers": []},
    "qwen2_moe-windowed": _QWEN2_MOE | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen3": _BASE | {"model_type": "qwen3", "head_dim": 12, "tie_word_embeddings": True},
    "qwen3-windowed": _BASE
    | {"model_type": "qwen3", "head_dim": 12, "attention_bias": True, "use_sliding_window": True, "sliding_window": 7}
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": _BASE
    | {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
    | {"norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 7, "head_dim": 12},
    "olmoe": _BASE | {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 12},
    "olmoe-normed": _BASE
    | {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 12}
    | {"norm_topk_prob": True, "num_key_value_heads": 4},
    "gpt_oss": _GPT_OSS,
    "gpt_oss-plain-rope": _GPT_OSS
    | {"layer_types": ["full_attention", "sliding_attention"], "rope_parameters": {"rope_type": "default"}},
    "deepseek_v2-grouped": _DEEPSEEK_V2 | {"topk_method": "group_limited_greedy"},
    "deepseek_v2-lite": _DEEPSEEK_V2 | {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v3-yarn": _DEEPSEEK_V3
    | _scaled("yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0)
    | {"norm_topk_prob": False, "attention_bias": True},
    "gemma": _BASE | {"model_type": "gemma", "head_dim": 12, "num_key_value_heads": 1},
    "gemma2": _GEMMA2,
    "gemma2-uncapped": _GEMMA2
    | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "hidden_activation": "gelu"},
    "gemma3": _GEMMA3,
    "gemma3-scaled": _GEMMA3
    | _scaled("linear", factor=8.0)
    | {"rope_theta": 1000.0, "rope_local_base_freq": 50.0, "final_logit_softcapping": 0.8},
    "gemma3-new-style": _GEMMA3
    | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    | {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 77.0},
        }
    },
    "phi3": _PHI3 | {"sliding_window": 7},
    "phi3-partial": _PHI3 | {"partial_rotary_factor": 0.5, "tie_word_embeddings": True},
    "phi3-longrope-short": _PHI3 | _longrope(4, 32),
    "phi3-longrope-long": _PHI3 | _longrope(3, 16) | {"partial_rotary_factor": 0.75},
    "gpt2": _GPT2,
    "gpt2-untied": _GPT2 | {"n_inner": 50, "activation_function": "gelu", "tie_word_embeddings": False},
}


@dataclass(frozen=True)
class Pair:
    """The same model twice: transformers' and ours, with equal weights."""

    theirs: Any
    ours: Decoder
    tokens: Tensor
    labels: Tensor


@cache
def pair(name: str) -> Pair:
    """Both models of the case `name`, in float32 and in evaluation mode, and tokens to run through them."""
    torch.manual_seed(sum(name.encode()))
    config = transformers.AutoConfig.for_model(**deepcopy(CASES[name]))  # it writes into nested objects
    theirs = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        biases = (buffer for name, buffer in theirs.named_buffers() if name.endswith(CORRECTION))
        for parameter in (*theirs.parameters(), *biases):
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    spec = spec_from_config(CASES[name], name)
    ours = Decoder(spec).eval()
    fill(ours, as_stored(theirs))
    tokens = torch.randint(0, spec.vocab_size, (BATCH, LENGTH))
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    labels[0, 3] = -100
    return Pair(theirs, ours, tokens, labels)


def fill(ours: Decoder, theirs: Mapping[str, Tensor]) -> None:
    """Load tensors under Hugging Face's names, from a file of them."""
    with TemporaryDirectory() as folder:
        stored = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in theirs.items()}
        save_file(stored, Path(folder) / SINGLE_FILE)
        load_weights(ours, Path(folder))


def as_stored(model: nn.Module, *, grads: bool = False) -> dict[str, Tensor]:
    """The parameters (or gradients) of a transformers model under the names they have on disk.

    In memory transformers 5 keeps the experts of a layer in two stacked tensors, on disk they are one matrix each.
    """
    block, gate, up, down = "mlp", "gate_proj", "up_proj", "down_proj"
    if model.config.model_type == "gpt_oss":  # stacked on disk too
        kept = {name: parameter.grad if grads else parameter.detach() for name, parameter in model.named_parameters()}
        assert all(tensor is not None for tensor in kept.values())
        return kept  # type: ignore[return-value]
    if model.config.model_type == "mixtral":
        block, gate, up, down = "block_sparse_moe", "w1", "w3", "w2"
    stored: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if grads else parameter.detach()
        assert tensor is not None, name
        if name.endswith("experts.gate_up_proj"):
            for i, expert in enumerate(tensor):
                prefix = name.replace("mlp.experts.gate_up_proj", f"{block}.experts.{i}")
                stored[f"{prefix}.{gate}.weight"], stored[f"{prefix}.{up}.weight"] = expert.chunk(2)
        elif name.endswith("experts.down_proj"):
            for i, expert in enumerate(tensor):
                stored[name.replace("mlp.experts.down_proj", f"{block}.experts.{i}.{down}.weight")] = expert
        else:
            stored[name.replace("mlp.gate.weight", f"{block}.gate.weight")] = tensor
    if not grads:
        stored |= {name: buffer for name, buffer in model.named_buffers() if name.endswith(CORRECTION)}
    return stored


def distance(found: Tensor, wanted: Tensor) -> float:
    """‖found − wanted‖ / ‖wanted‖."""
    return ((found - wanted).norm() / wanted.norm().clamp(min=1e-12)).item()
