"""The supported model families, one row each: what their config.json calls things, and what their weights are called.

A row says which fields a family reads and under which names (the first is the one written), the defaults that
transformers' config class gives to missing ones, the properties the family fixes, which of its layers have a sliding
window, and how its tensors map to the decoder's. `config.py` and `weights.py` treat all rows alike: a new family is a
new row. Dropout fields are not read: the decoder has none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tightfit.models.huggingface import weight_names as names
from tightfit.models.huggingface.weight_names import Rule, llama_rules
from tightfit.models.spec import Activation

WindowRule = Literal["none", "all", "after_max_window_layers", "even_before_max_window_layers", "pattern"]
Names = tuple[str, ...]

_LLAMA_PREFIXES = (("layers.", "model.layers."), ("embed_tokens.", "model.embed_tokens."), ("norm.", "model.norm."))


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row: see the module docstring. Keys of `fields` are those of ModelSpec, of `experts` those of Experts."""

    architecture: str
    defaults: Mapping[str, Any]
    fields: Mapping[str, Names]
    weights: tuple[Rule, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    insists: Mapping[str, Any] = field(default_factory=lambda: {"partial_rotary_factor": 1.0})
    """Fields that could change the computation in a way the decoder does not do: only this value or null will do."""
    activations: dict[str, Activation] = field(default_factory=dict)
    """Activation names that mean something else in this family than elsewhere."""
    experts: Mapping[str, Names] | None = None
    fixed_experts: Mapping[str, Any] = field(default_factory=dict)
    """Properties of Experts that the family fixes."""
    latent: Mapping[str, Names] | None = None
    """Fields of Latent, where the family has latent attention; `plain_dim` is a head's part that is not rotated."""
    windows: WindowRule = "none"
    layer_types: bool = False
    """Whether a `layer_types` list overrules the window rule."""
    two_ropes: bool = False
    default_rope: Mapping[str, Any] = field(default_factory=dict)
    """The rope scaling of a config that names none."""
    rope_types: Mapping[str, str] = field(default_factory=dict)
    """Rope scaling names that mean something else in this family than elsewhere."""
    scales_embedding: bool = False
    prefixes: tuple[tuple[str, str], ...] = _LLAMA_PREFIXES
    """Beginnings of tensor names in other layouts of the same weights, and what to read them as."""
    ignored: str = r"rotary_emb\.inv_freq$"
    """Tensors that may be there and are not needed, as a regular expression."""


_FIELDS: dict[str, Names] = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size",),
    "layers": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "mlp_size": ("intermediate_size",),
    "max_positions": ("max_position_embeddings",),
    "tied": ("tie_word_embeddings",),
    "norm_eps": ("rms_norm_eps",),
    "activation": ("hidden_act",),
}
_BIASED_FIELDS = _FIELDS | {"qkv_bias": ("attention_bias",), "output_bias": ("attention_bias",)}
_GEMMA2_FIELDS = _BIASED_FIELDS | {
    "activation": ("hidden_activation",),
    "logit_softcap": ("final_logit_softcapping",),
    "attention_scale": ("query_pre_attn_scalar",),
}
_GPT2_FIELDS: dict[str, Names] = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("n_embd", "hidden_size"),
    "layers": ("n_layer", "num_hidden_layers"),
    "heads": ("n_head", "num_attention_heads"),
    "mlp_size": ("n_inner",),
    "max_positions": ("n_positions", "max_position_embeddings"),
    "tied": ("tie_word_embeddings",),
    "norm_eps": ("layer_norm_epsilon",),
    "activation": ("activation_function",),
}
_MIXTRAL_EXPERTS: dict[str, Names] = {
    "count": ("num_local_experts", "num_experts"),
    "per_token": ("num_experts_per_tok",),
    "mlp_size": ("intermediate_size",),
    "balance_weight": ("router_aux_loss_coef",),
}
_QWEN_EXPERTS = _MIXTRAL_EXPERTS | {
    "count": ("num_experts", "num_local_experts"),
    "mlp_size": ("moe_intermediate_size",),
    "normalise": ("norm_topk_prob",),
}

_DEEPSEEK_EXPERTS: dict[str, Names] = {
    "count": ("n_routed_experts", "num_local_experts"),
    "per_token": ("num_experts_per_tok",),
    "mlp_size": ("moe_intermediate_size",),
    "normalise": ("norm_topk_prob",),
    "scale": ("routed_scaling_factor",),
}
_LATENT: dict[str, Names] = {
    "kv_rank": ("kv_lora_rank",),
    "query_rank": ("q_lora_rank",),
    "rope_dim": ("qk_rope_head_dim",),
    "plain_dim": ("qk_nope_head_dim",),
    "value_dim": ("v_head_dim",),
}
_LATENT_FIELDS = {name: names for name, names in _BIASED_FIELDS.items() if name != "head_dim"}

_LLAMA: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
}
_MISTRAL = _LLAMA | {
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
_MIXTRAL = _MISTRAL | {
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "rope_theta": 1_000_000.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.001,
}
_QWEN2 = _LLAMA | {
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN2_MOE = _QWEN2 | {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "qkv_bias": True,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001,
}
_QWEN3_MOE = _QWEN2_MOE | {
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
_OLMOE = _LLAMA | {
    "vocab_size": 50_304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.01,
}
_GPT_OSS = _LLAMA | {
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "attention_bias": True,
    "sliding_window": 128,
    "sliding_window_pattern": 2,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "router_aux_loss_coef": 0.001,
}
_GPT_OSS_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_DEEPSEEK_V2 = _LLAMA | {
    "vocab_size": 102_400,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": None,
    "moe_intermediate_size": 1407,
    "first_k_dense_replace": 0,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "n_group": None,
    "topk_group": None,
    "aux_loss_alpha": 0.001,
}
_DEEPSEEK_V3 = _DEEPSEEK_V2 | {
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "max_position_embeddings": 4096,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
}
_GEMMA = _LLAMA | {
    "vocab_size": 256_000,
    "hidden_size": 3072,
    "intermediate_size": 24_576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_GEMMA2 = _GEMMA | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_GEMMA3 = _GEMMA2 | {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "sliding_window_pattern": 6,
}
_PHI3 = _LLAMA | {
    "vocab_size": 32_064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "original_max_position_embeddings": 4096,
}
_GPT2: dict[str, Any] = {
    "vocab_size": 50_257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
_GEMMA_INSISTS = {"partial_rotary_factor": 1.0, "use_bidirectional_attention": False}
_GEMMA2_FIXED = {"norm": "rms_plus_one", "sandwich_norms": True}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        defaults=_LLAMA,
        fields=_BIASED_FIELDS | {"mlp_bias": ("mlp_bias",)},
        weights=llama_rules(*names.SPLIT, *names.MLP_NORM),
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        defaults=_MISTRAL,
        fields=_FIELDS,
        windows="all",
        weights=llama_rules(*names.SPLIT, *names.MLP_NORM),
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        defaults=_MIXTRAL,
        fields=_FIELDS,
        experts=_MIXTRAL_EXPERTS,
        windows="all",
        weights=llama_rules(*names.SPLIT, *names.MLP_NORM, *names.MIXTRAL_EXPERTS),
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        defaults=_QWEN2,
        fields=_FIELDS,
        fixed={"qkv_bias": True},
        windows="after_max_window_layers",
        layer_types=True,
        weights=llama_rules(*names.SPLIT, *names.MLP_NORM),
    ),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM",
        defaults=_QWEN2_MOE,
        fields=_FIELDS | {"qkv_bias": ("qkv_bias",)},
        experts=_QWEN_EXPERTS | {"shared_size": ("shared_expert_intermediate_size",)},
        windows="even_before_max_window_layers",
        layer_types=True,
        weights=llama_rules(*names.SPLIT, *names.MLP_NORM, *names.QWEN_EXPERTS, *names.SHARED_EXPERT),
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        defaults=_QWEN2 | {"head_dim": 128},
        fields=_BIASED_FIELDS,
        fixed={"qk_norm": True},
        windows="after_max_window_layers",
        layer_types=True,
        weights=llama_rules(*names.SPLIT, *names.MLP_NORM, *names.QK_NORMS),
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        defaults=_QWEN3_MOE,
        fields=_BIASED_FIELDS,
        fixed={"qk_norm": True},
        experts=_QWEN_EXPERTS,
        windows="all",
        weights=llama_rules(*names.SPLIT, *names.MLP_NORM, *names.QK_NORMS, *names.QWEN_EXPERTS),
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        defaults=_OLMOE,
        fields=_BIASED_FIELDS,
        fixed={"qk_norm": True, "qk_norm_joint": True},
        insists={"partial_rotary_factor": 1.0, "clip_qkv": None},
        experts=_QWEN_EXPERTS | {"mlp_size": ("intermediate_size",)},
        weights=llama_rules(*names.SPLIT, *names.MLP_NORM, *names.QK_NORMS, *names.QWEN_EXPERTS),
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        defaults=_GPT_OSS,
        fields=_BIASED_FIELDS,
        fixed={"sinks": True, "mlp_bias": True},
        insists={"partial_rotary_factor": 1.0, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        activations={"silu": "swiglu_clamped"},
        experts=_MIXTRAL_EXPERTS,
        fixed_experts={"router_bias": True},
        windows="pattern",
        layer_types=True,
        default_rope=_GPT_OSS_ROPE,
        weights=llama_rules(*names.SPLIT, *names.MLP_NORM, *names.GPT_OSS),
    ),
    "deepseek_v2": Family(
        architecture="DeepseekV2ForCausalLM",
        defaults=_DEEPSEEK_V2,
        fields=_LATENT_FIELDS,
        insists={"norm_topk_prob": False, "mlp_bias": False, "moe_layer_freq": 1},
        experts=_DEEPSEEK_EXPERTS | {"balance_weight": ("aux_loss_alpha",)},
        fixed_experts={"shared_gated": False},
        latent=_LATENT,
        weights=llama_rules(*names.LATENT, *names.MLP_NORM, *names.QWEN_EXPERTS, *names.SHARED_EXPERTS),
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        defaults=_DEEPSEEK_V3,
        fields=_LATENT_FIELDS,
        insists={"rope_interleave": True, "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        experts=_DEEPSEEK_EXPERTS,
        fixed_experts={"shared_gated": False, "corrected": True, "score": "sigmoid"},
        latent=_LATENT,
        weights=llama_rules(*names.LATENT, *names.MLP_NORM, *names.QWEN_EXPERTS, *names.SHARED_EXPERTS),
        ignored=r"rotary_emb\.inv_freq$|^model\.layers\.61\.",  # multi-token prediction
    ),
    "gemma": Family(
        architecture="GemmaForCausalLM",
        defaults=_GEMMA,
        fields=_BIASED_FIELDS,
        fixed={"norm": "rms_plus_one"},
        insists=_GEMMA_INSISTS,
        activations={"gelu": "gelu_tanh"},
        scales_embedding=True,
        weights=llama_rules(*names.SPLIT, *names.MLP_NORM),
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        defaults=_GEMMA2,
        fields=_GEMMA2_FIELDS | {"attention_softcap": ("attn_logit_softcapping",)},
        fixed=_GEMMA2_FIXED,
        insists=_GEMMA_INSISTS,
        windows="pattern",
        layer_types=True,
        scales_embedding=True,
        weights=llama_rules(*names.SPLIT, *names.SANDWICH_NORMS),
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        defaults=_GEMMA3,
        fields=_GEMMA2_FIELDS,
        fixed=_GEMMA2_FIXED | {"qk_norm": True},
        insists=_GEMMA_INSISTS | {"attn_logit_softcapping": None},
        windows="pattern",
        layer_types=True,
        two_ropes=True,
        scales_embedding=True,
        weights=llama_rules(*names.SPLIT, *names.SANDWICH_NORMS, *names.QK_NORMS),
        prefixes=(
            ("language_model.model.", "model."),
            ("model.language_model.", "model."),
            ("language_model.lm_head.", "lm_head."),
            *_LLAMA_PREFIXES,
        ),
        ignored=r"rotary_emb\.inv_freq$|^(model\.)?(vision_tower|multi_modal_projector)\.",
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        defaults=_PHI3,
        fields=_FIELDS,
        insists={},
        windows="all",
        rope_types={"su": "longrope", "yarn": "longrope"},
        weights=llama_rules(*names.FUSED, *names.MLP_NORM),
    ),
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        defaults=_GPT2,
        fields=_GPT2_FIELDS,
        fixed={"norm": "layer", "gated": False, "qkv_bias": True, "output_bias": True, "mlp_bias": True, "rope": None},
        insists={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        weights=names.GPT2,
        prefixes=tuple((f"{part}.", f"transformer.{part}.") for part in ("wte", "wpe", "h", "ln_f")),
        ignored=r"\.attn\.(bias|masked_bias)$",
    ),
}
