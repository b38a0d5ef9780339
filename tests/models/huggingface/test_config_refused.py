"""Everything a bad config.json can hold, each answered by one sentence that names the field, the value and the fix."""

from typing import Any

import pytest

from tests.models.huggingface.reference import CASES
from tightfit.errors import UserError
from tightfit.models.huggingface.config import spec_from_config
from tightfit.models.huggingface.families import FAMILIES

LLAMA = CASES["llama"]


def rope(**constants: Any) -> dict:
    return LLAMA | {"rope_scaling": constants}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
HOSTILE: dict[str, tuple[Any, str]] = {
    "list": ([1], "holds a list"),
    "string": ("llama", "holds a str"),
    "null": (None, "holds a NoneType"),
    "no-family": ({}, "model_type in x is missing; supported families are llama, mistral"),
    "unknown-family": ({"model_type": "falcon"}, "model_type in x is 'falcon'; supported families are"),
    "family-is-a-list": ({"model_type": ["llama"]}, r"\['llama'\]"),
    "size-string": (LLAMA | {"hidden_size": "4096"}, "hidden_size in x is '4096'; it must be a whole number"),
    "size-float": (LLAMA | {"hidden_size": 32.0}, "hidden_size in x is 32.0"),
    "size-bool": (LLAMA | {"num_hidden_layers": True}, "num_hidden_layers in x is True"),
    "size-null": (LLAMA | {"vocab_size": None}, "vocab_size in x is missing"),
    "size-zero": (LLAMA | {"num_attention_heads": 0}, "num_attention_heads in x is 0"),
    "size-negative": (LLAMA | {"intermediate_size": -1}, "intermediate_size in x is -1"),
    "size-absurd": (LLAMA | {"num_hidden_layers": 10**12}, "from 1 to 10,000"),
    "size-endless": (LLAMA | {"hidden_size": 10**400}, "hidden_size in x is 1"),
    "heads": (LLAMA | {"num_key_value_heads": 3}, r"4 attention heads and 3 key/value heads.*\(in x\)"),
    "no-head-dim": (
        LLAMA | {"num_attention_heads": 5, "num_key_value_heads": 5},
        "head_dim in x is missing.*no multiple",
    ),
    "odd-head-dim": (LLAMA | {"head_dim": 9}, "must be even"),
    "eps-nan": (LLAMA | {"rms_norm_eps": float("nan")}, "rms_norm_eps in x is nan"),
    "eps-infinite": (LLAMA | {"rms_norm_eps": float("inf")}, "rms_norm_eps in x is inf"),
    "eps-negative": (LLAMA | {"rms_norm_eps": -1e-6}, "rms_norm_eps in x is -1e-06"),
    "eps-text": (LLAMA | {"rms_norm_eps": "small"}, "rms_norm_eps in x is 'small'"),
    "flag-text": (LLAMA | {"tie_word_embeddings": "no"}, "tie_word_embeddings in x is 'no'; it must be true or false"),
    "activation": (LLAMA | {"hidden_act": "mish"}, "hidden_act in x is 'mish'; known activations are silu"),
    "activation-type": (LLAMA | {"hidden_act": 3}, "hidden_act in x is 3; it must be a string"),
    "theta-text": (LLAMA | {"rope_theta": "1e4"}, "rope_theta in x is '1e4'"),
    "theta-one": (LLAMA | {"rope_theta": 1.0}, "rope_theta in x is 1.0; it must be a number above 1"),
    "theta-absurd": (LLAMA | {"rope_theta": 1e300}, "rope_theta in x is 1e\\+300"),
    "rope-list": (LLAMA | {"rope_scaling": [8]}, "rope_scaling in x is .8.; it must be an object"),
    "rope-kind": (rope(rope_type="xpos"), "rope_scaling.rope_type in x is 'xpos'; use one of default, linear"),
    "rope-kind-type": (rope(rope_type=["linear"]), "rope_scaling.rope_type in x is"),
    "rope-no-factor": (rope(rope_type="linear"), "rope_scaling.factor in x is missing"),
    "rope-factor-nan": (rope(type="dynamic", factor=float("nan")), "rope_scaling.factor in x is nan"),
    "rope-factor-zero": (rope(type="linear", factor=0), "rope_scaling.factor in x is 0"),
    "rope-bands": (rope(rope_type="llama3", **LLAMA3 | {"high_freq_factor": 1.0}), "larger than low_freq_factor"),
    "rope-trained": (rope(rope_type="llama3", **LLAMA3 | {"original_max_position_embeddings": 1}), "from 2 to"),
    "rope-one-position": (rope(rope_type="yarn", factor=2.0) | {"max_position_embeddings": 1}, "yarn needs it"),
    "rope-trained-type": (rope(rope_type="yarn", factor=2.0, original_max_position_embeddings="4k"), "'4k'"),
    "rope-truncate": (rope(rope_type="yarn", factor=2.0, truncate="yes"), "truncate in x is 'yes'"),
    "rope-no-pairs": (
        CASES["phi3"] | {"rope_scaling": {"type": "longrope"}},
        "rope_scaling.short_factor in x is missing",
    ),
    "rope-few-pairs": (
        CASES["phi3"] | {"rope_scaling": {"type": "su", "short_factor": [1.0] * 4, "long_factor": [1.0] * 3}},
        "rope_scaling.long_factor in x is .*a list of 4 numbers",
    ),
    "rope-bad-pair": (
        CASES["phi3"] | {"rope_scaling": {"type": "su", "short_factor": [1, 1, "1", 1], "long_factor": [1] * 4}},
        r"short_factor\[2\] in x is '1'",
    ),
    "rope-nested": (
        LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}},
        "one rope for all its layers",
    ),
    "rope-not-nested": (CASES["gemma3"] | {"rope_parameters": {"rope_theta": 5.0}}, "one object per layer type"),
    "partial": (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor in x is 0.5; only 1.0 is supported"),
    "partial-inside": (
        LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor in x is 0.5",
    ),
    "partial-above": (CASES["phi3"] | {"partial_rotary_factor": 1.5}, "at most 1"),
    "partial-odd": (CASES["phi3"] | {"partial_rotary_factor": 0.4}, "must be even"),
    "window-zero": (CASES["mistral"] | {"sliding_window": 0}, "sliding_window in x is 0"),
    "window-text": (CASES["phi3"] | {"sliding_window": "big"}, "sliding_window in x is 'big'"),
    "window-missing": (CASES["gemma2"] | {"sliding_window": None}, "sliding_window in x is missing.*2 layers"),
    "types-length": (CASES["gemma2"] | {"layer_types": ["full_attention"]}, "each of the 3 layers"),
    "types-unknown": (CASES["qwen3"] | {"layer_types": ["full_attention", "linear"]}, "layer_types in x is 'linear'"),
    "types-not-a-list": (CASES["qwen3"] | {"layer_types": "full"}, "it must be a list"),
    "types-not-ours": (CASES["mistral"] | {"layer_types": ["full_attention"] * 2}, "in all its layers or in none"),
    "types-without-window": (
        CASES["qwen3"] | {"layer_types": ["full_attention", "sliding_attention"]},
        "sliding_window in x is missing",
    ),
    "cap-zero": (CASES["gemma2"] | {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping in x is 0.0"),
    "cap-gemma3": (CASES["gemma3"] | {"attn_logit_softcapping": 50.0}, "only null is supported"),
    "scale": (CASES["gemma2"] | {"query_pre_attn_scalar": -4}, "query_pre_attn_scalar in x is -4"),
    "bidirectional": (CASES["gemma3"] | {"use_bidirectional_attention": True}, "only False is supported"),
    "layer-scaled": (CASES["gpt2"] | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    "pattern": (CASES["gemma3"] | {"sliding_window_pattern": 0}, "sliding_window_pattern in x is 0"),
    "experts": (CASES["mixtral"] | {"num_experts_per_tok": 9}, r"routes to 9 of 5 experts.*\(in x\)"),
    "experts-none": (CASES["mixtral"] | {"num_local_experts": 0}, "num_local_experts in x is 0"),
    "experts-step": (CASES["qwen3_moe"] | {"decoder_sparse_step": 0}, "decoder_sparse_step in x is 0"),
    "dense-layers": (CASES["qwen3_moe"] | {"mlp_only_layers": [7]}, "mlp_only_layers in x is 7"),
    "dense-layers-type": (CASES["qwen3_moe"] | {"mlp_only_layers": ["a"]}, "mlp_only_layers in x is 'a'"),
    "balance": (CASES["mixtral"] | {"router_aux_loss_coef": -1.0}, "router_aux_loss_coef in x is -1.0"),
    "text-part": ({"model_type": "gemma3", "text_config": 5}, "text_config in x is 5"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_bad_configs(what: str) -> None:
    config, message = HOSTILE[what]
    with pytest.raises(UserError, match=message) as caught:
        spec_from_config(config, "x")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_no_single_value_can_crash_the_reader() -> None:
    junk = [None, True, -1, 0, 1, 10**30, 1.5, float("nan"), float("-inf"), "", "x", [], [None], {}, {"a": 1}]
    for name, config in CASES.items():
        for field in {**FAMILIES[config["model_type"]].defaults, **config, "layer_types": 0, "rope_parameters": 0}:
            for value in junk:
                try:
                    spec_from_config(config | {field: value}, name)
                except UserError:
                    continue
