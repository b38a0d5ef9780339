"""Well-known models by name: the fields of their published config.json that matter, one row each.

Rows go through `spec_from_config` like any file, so what a row leaves out is the family's default. The `tiny-` ones
have every trait of their family (windows, experts, softcaps, …) at a size that runs in a test; `nano-llama` learns
something in minutes on a CPU.
"""

import difflib
from functools import cache
from typing import Any

from tightfit.errors import UserError
from tightfit.models.huggingface.config import spec_from_config
from tightfit.models.spec import ModelSpec

Row = dict[str, Any]


def _row(base: Row, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Row:
    """`base` with the sizes that differ between models of one family."""
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
    return base | sizes | {"num_attention_heads": heads, "num_key_value_heads": kv_heads} | more


def _gpt2(width: int, layers: int, heads: int) -> Row:
    return {"model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": heads}


def _llama3_scaling(factor: float) -> Row:
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_type": "llama3", "factor": factor, **bands}


def _divisors(numbers: str) -> list[float]:
    """LongRoPE's divisors, one per rotated pair, from a block of text."""
    return [float(number) for number in numbers.split()]


# LongRoPE divisors as published with microsoft/Phi-3-mini-128k-instruct and microsoft/Phi-4-mini-instruct.
_PHI3_MINI_LONG = _divisors(
    """
    1.0700000524520874 1.1200000047683716 1.149999976158142 1.4199999570846558 1.5699999332427979 1.7999999523162842
    2.129999876022339 2.129999876022339 3.009999990463257 5.910000324249268 6.950000286102295 9.070000648498535
    9.930000305175781 10.710000038146973 11.130000114440918 14.609999656677246 15.409998893737793 19.809999465942383
    37.279998779296875 38.279998779296875 38.599998474121094 40.12000274658203 46.20000457763672 50.940006256103516
    53.66000747680664 54.9373893737793 56.89738845825195 57.28738784790039 59.98738479614258 60.86738586425781
    60.887386322021484 61.71739196777344 62.91739273071289 62.957393646240234 63.41739273071289 63.8173942565918
    63.83739471435547 63.897396087646484 63.93739700317383 64.06739807128906 64.11434936523438 64.12435150146484
    64.15435028076172 64.19435119628906 64.24435424804688 64.57435607910156 64.69000244140625 64.76000213623047
    """
)
_PHI3_MINI_SHORT = _divisors(
    """
    1.1 1.1 1.1 1.3000000000000003 1.3500000000000003 1.3500000000000003 1.4000000000000004 1.5500000000000005
    2.000000000000001 2.000000000000001 2.000000000000001 2.000000000000001 2.000000000000001 2.000000000000001
    2.000000000000001 2.000000000000001 2.000000000000001 2.000000000000001 2.000000000000001 2.000000000000001
    2.000000000000001 2.000000000000001 2.000000000000001 2.000000000000001 2.000000000000001 2.0500000000000007
    2.0500000000000007 2.0500000000000007 2.0500000000000007 2.0500000000000007 2.0500000000000007
    2.1000000000000005 2.1000000000000005 2.1500000000000004 2.25 2.25 2.25 2.25 2.25 2.3999999999999995
    2.4499999999999993 2.499999999999999 2.6999999999999984 2.6999999999999984 2.7499999999999982 2.799999999999998
    2.8999999999999977 3.049999999999997
    """
)
_PHI4_MINI_LONG = _divisors(
    """
    1 1.118320672 1.250641126 1.398617824 1.564103225 1.74916897 1.956131817 2.187582649 2.446418898 2.735880826
    3.059592084 3.421605075 3.826451687 4.279200023 4.785517845 5.351743533 5.984965424 6.693110555 7.485043894
    8.370679318 9.36110372 10.4687158 11.70738129 13.09260651 14.64173252 16.37415215 18.31155283 20.47818807
    22.90118105 25.61086418 28.64115884 32.03 32.1 32.13 32.23 32.6 32.61 32.64 32.66 32.7 32.71 32.93 32.97 33.28
    33.49 33.5 44.16 47.77
    """
)


def _longrope(short: list[float], long: list[float]) -> Row:
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long}


_LLAMA2: Row = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
_LLAMA31 = _LLAMA2 | {
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "rope_scaling": _llama3_scaling(8.0),
}
_LLAMA32 = _LLAMA31 | {"tie_word_embeddings": True, "rope_scaling": _llama3_scaling(32.0)}
_SMOLLM2: Row = {
    "model_type": "llama",
    "vocab_size": 49_152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 100_000.0,
}
_MISTRAL: Row = {"model_type": "mistral", "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5}
_MIXTRAL: Row = {"model_type": "mixtral", "max_position_embeddings": 32_768}
_QWEN25: Row = {"model_type": "qwen2", "rope_theta": 1_000_000.0, "max_position_embeddings": 131_072}
_QWEN25_SMALL = _QWEN25 | {"tie_word_embeddings": True, "max_position_embeddings": 32_768}
_QWEN25_LARGE = _QWEN25 | {"vocab_size": 152_064, "rms_norm_eps": 1e-5}
_QWEN3: Row = {
    "model_type": "qwen3",
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rope_theta": 1_000_000.0,
}
_QWEN3_SMALL = _QWEN3 | {"tie_word_embeddings": True}
_QWEN3_MOE = _QWEN3 | {"model_type": "qwen3_moe", "norm_topk_prob": True}
_OLMOE: Row = {"model_type": "olmoe"}
_GPT_OSS: Row = {"model_type": "gpt_oss", "router_aux_loss_coef": 0.9}


def _deepseek_yarn(mscale: float) -> Row:
    bands = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
    scaling = {"rope_type": "yarn", "factor": 40.0, "mscale": mscale, "mscale_all_dim": mscale, **bands}
    return {"rope_scaling": scaling, "max_position_embeddings": 163_840}


_DEEPSEEK_V2: Row = {
    "model_type": "deepseek_v2",
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    **_deepseek_yarn(0.707),
}
_DEEPSEEK_V2_LARGE = _DEEPSEEK_V2 | {
    "n_routed_experts": 160,
    "moe_intermediate_size": 1536,
    "topk_method": "group_limited_greedy",
    "n_group": 8,
    "topk_group": 3,
    "routed_scaling_factor": 16.0,
    **_deepseek_yarn(1.0),
}
_DEEPSEEK_V3: Row = {"model_type": "deepseek_v3", **_deepseek_yarn(1.0)}
_GEMMA2: Row = {"model_type": "gemma2"}
_GEMMA3: Row = {
    "model_type": "gemma3_text",
    "sliding_window": 1024,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
_GEMMA3_SMALL: Row = {
    "model_type": "gemma3_text",
    "vocab_size": 262_144,
    "max_position_embeddings": 32_768,
    "sliding_window": 512,
}
_PHI3: Row = {"model_type": "phi3"}
_TINY: Row = {"vocab_size": 512, "max_position_embeddings": 256}
_TINY_LATENT: Row = _TINY | {
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_TINY_EXPERTS: Row = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_PHI_3_MINI_128K = _PHI3 | {
    "sliding_window": 262_144,
    "max_position_embeddings": 131_072,
    "rope_scaling": _longrope(_PHI3_MINI_SHORT, _PHI3_MINI_LONG),
}
_PHI_4 = _PHI3 | {
    "vocab_size": 100_352,
    "max_position_embeddings": 16_384,
    "rope_theta": 250_000.0,
    "original_max_position_embeddings": 16_384,
}
_PHI_4_MINI = _PHI3 | {
    "vocab_size": 200_064,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "sliding_window": 262_144,
    "partial_rotary_factor": 0.75,
    "rope_scaling": _longrope([1.0] * 48, _PHI4_MINI_LONG),
}
_NANO_LLAMA = _TINY | {
    "model_type": "llama",
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
_TINY_QWEN2_MOE = (
    _TINY
    | _TINY_EXPERTS
    | {
        "model_type": "qwen2_moe",
        "mlp_only_layers": [0],
        "shared_expert_intermediate_size": 64,
    }
)
_TINY_GEMMA2 = _TINY | {
    "model_type": "gemma2",
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 16,
}
_TINY_GPT_OSS = _TINY | {
    "model_type": "gpt_oss",
    "head_dim": 16,
    "sliding_window": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
_TINY_GEMMA3 = _TINY | {
    "model_type": "gemma3_text",
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 16,
    "sliding_window_pattern": 2,
}

PRESETS: dict[str, Row] = {
    "llama-2-7b": _row(_LLAMA2, 4096, 11_008, 32, 32, 32),
    "llama-2-13b": _row(_LLAMA2, 5120, 13_824, 40, 40, 40),
    "llama-2-70b": _row(_LLAMA2, 8192, 28_672, 80, 64, 8),
    "llama-3.1-8b": _row(_LLAMA31, 4096, 14_336, 32, 32, 8),
    "llama-3.1-70b": _row(_LLAMA31, 8192, 28_672, 80, 64, 8),
    "llama-3.1-405b": _row(_LLAMA31, 16_384, 53_248, 126, 128, 8),
    "llama-3.2-1b": _row(_LLAMA32, 2048, 8192, 16, 32, 8, head_dim=64),
    "llama-3.2-3b": _row(_LLAMA32, 3072, 8192, 28, 24, 8, head_dim=128),
    "mistral-7b-v0.1": _row(_MISTRAL, 4096, 14_336, 32, 32, 8, sliding_window=4096),
    "mistral-7b": _row(_MISTRAL, 4096, 14_336, 32, 32, 8, vocab_size=32_768, rope_theta=1e6, sliding_window=None),
    "mixtral-8x7b": _row(_MIXTRAL, 4096, 14_336, 32, 32, 8, num_local_experts=8, router_aux_loss_coef=0.02),
    "qwen2.5-0.5b": _row(_QWEN25_SMALL, 896, 4864, 24, 14, 2),
    "qwen2.5-1.5b": _row(_QWEN25_SMALL, 1536, 8960, 28, 12, 2, max_position_embeddings=131_072),
    "qwen2.5-3b": _row(_QWEN25_SMALL, 2048, 11_008, 36, 16, 2),
    "qwen2.5-7b": _row(_QWEN25, 3584, 18_944, 28, 28, 4, vocab_size=152_064),
    "qwen2.5-14b": _row(_QWEN25_LARGE, 5120, 13_824, 48, 40, 8),
    "qwen2.5-32b": _row(_QWEN25_LARGE, 5120, 27_648, 64, 40, 8),
    "qwen2.5-72b": _row(_QWEN25_LARGE, 8192, 29_568, 80, 64, 8),
    "qwen3-0.6b": _row(_QWEN3_SMALL, 1024, 3072, 28, 16, 8),
    "qwen3-1.7b": _row(_QWEN3_SMALL, 2048, 6144, 28, 16, 8),
    "qwen3-4b": _row(_QWEN3_SMALL, 2560, 9728, 36, 32, 8),
    "qwen3-8b": _row(_QWEN3, 4096, 12_288, 36, 32, 8),
    "qwen3-14b": _row(_QWEN3, 5120, 17_408, 40, 40, 8),
    "qwen3-32b": _row(_QWEN3, 5120, 25_600, 64, 64, 8),
    "qwen3-30b-a3b": _row(_QWEN3_MOE, 2048, 6144, 48, 32, 4),
    "qwen3-235b-a22b": _row(_QWEN3_MOE, 4096, 12_288, 94, 64, 4, moe_intermediate_size=1536),
    "olmoe-1b-7b": _row(_OLMOE, 2048, 1024, 16, 16, 16),
    "deepseek-v2-lite": _row(_DEEPSEEK_V2, 2048, 10_944, 27, 16, 16, q_lora_rank=None, moe_intermediate_size=1408),
    "deepseek-v2": _row(_DEEPSEEK_V2_LARGE, 5120, 12_288, 60, 128, 128),
    "deepseek-v3": _row(_DEEPSEEK_V3, 7168, 18_432, 61, 128, 128),
    "gpt-oss-20b": _row(_GPT_OSS, 2880, 2880, 24, 64, 8, num_local_experts=32),
    "gpt-oss-120b": _row(_GPT_OSS, 2880, 2880, 36, 64, 8),
    "gemma-2-2b": _row(_GEMMA2, 2304, 9216, 26, 8, 4),
    "gemma-2-9b": _row(_GEMMA2, 3584, 14_336, 42, 16, 8),
    "gemma-2-27b": _row(_GEMMA2, 4608, 36_864, 46, 32, 16, head_dim=128, query_pre_attn_scalar=144),
    "gemma-3-270m": _row(_GEMMA3_SMALL, 640, 2048, 18, 4, 1),
    "gemma-3-1b": _row(_GEMMA3_SMALL, 1152, 6912, 26, 4, 1),
    "gemma-3-4b": _row(_GEMMA3, 2560, 10_240, 34, 8, 4),
    "gemma-3-12b": _row(_GEMMA3, 3840, 15_360, 48, 16, 8),
    "gemma-3-27b": _row(_GEMMA3, 5376, 21_504, 62, 32, 16, head_dim=128, query_pre_attn_scalar=168),
    "phi-3-mini-4k": _row(_PHI3, 3072, 8192, 32, 32, 32, sliding_window=2047),
    "phi-3-mini-128k": _row(_PHI_3_MINI_128K, 3072, 8192, 32, 32, 32),
    "phi-3-medium-4k": _row(_PHI3, 5120, 17_920, 40, 40, 10, sliding_window=2047),
    "phi-4": _row(_PHI_4, 5120, 17_920, 40, 40, 10),
    "phi-4-mini": _row(_PHI_4_MINI, 3072, 8192, 32, 24, 8),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "smollm2-135m": _row(_SMOLLM2, 576, 1536, 30, 9, 3),
    "smollm2-360m": _row(_SMOLLM2, 960, 2560, 32, 15, 5),
    "smollm2-1.7b": _row(_SMOLLM2, 2048, 8192, 24, 32, 32, rope_theta=130_000.0),
    "nano-llama": _row(_NANO_LLAMA, 96, 288, 3, 3, 3),
    "tiny-llama": _row(_TINY, 64, 128, 3, 4, 2, model_type="llama"),
    "tiny-mistral": _row(_TINY, 64, 128, 3, 4, 2, model_type="mistral", sliding_window=16),
    "tiny-mixtral": _row(_TINY, 64, 96, 2, 4, 2, model_type="mixtral", num_local_experts=4),
    "tiny-qwen2": _row(_TINY, 64, 128, 3, 4, 2, model_type="qwen2", tie_word_embeddings=True),
    "tiny-qwen2-moe": _row(_TINY_QWEN2_MOE, 64, 128, 3, 4, 2),
    "tiny-qwen3": _row(_TINY, 64, 128, 3, 4, 2, model_type="qwen3", head_dim=24, tie_word_embeddings=True),
    "tiny-qwen3-moe": _row(_TINY | _TINY_EXPERTS, 64, 128, 2, 4, 2, model_type="qwen3_moe", norm_topk_prob=True),
    "tiny-olmoe": _row(_TINY, 64, 32, 2, 4, 4, model_type="olmoe", num_experts=8, num_experts_per_tok=2),
    "tiny-deepseek-v2": _row(_TINY_LATENT, 64, 128, 3, 4, 4, model_type="deepseek_v2", q_lora_rank=None),
    "tiny-deepseek-v3": _row(_TINY_LATENT, 64, 128, 3, 4, 4, model_type="deepseek_v3"),
    "tiny-gpt-oss": _row(_TINY_GPT_OSS, 64, 32, 2, 4, 2),
    "tiny-gemma": _row(_TINY, 64, 128, 3, 4, 1, model_type="gemma", head_dim=16),
    "tiny-gemma2": _row(_TINY_GEMMA2, 64, 128, 4, 4, 2),
    "tiny-gemma3": _row(_TINY_GEMMA3, 64, 128, 4, 4, 2),
    "tiny-phi3": _row(_TINY, 64, 128, 3, 4, 2, model_type="phi3", partial_rotary_factor=0.5),
    "tiny-gpt2": _gpt2(64, 3, 4) | {"vocab_size": 512, "n_positions": 256},
}


def preset_names() -> tuple[str, ...]:
    """The names of all presets, grouped by family."""
    return tuple(PRESETS)


@cache
def preset(name: str) -> ModelSpec:
    """The shape of the preset `name`."""
    if name not in PRESETS:
        raise UserError(f"there is no model preset {name!r}; {suggestion(name)}")
    return spec_from_config(PRESETS[name], f"preset {name}")


def suggestion(name: str) -> str:
    """What to write instead of the unknown `name`."""
    near = difflib.get_close_matches(name.lower().rsplit("/", 1)[-1], PRESETS, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "`tightfit models` lists them"
    return hint
