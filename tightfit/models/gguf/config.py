"""The shape of a model in GGUF metadata: read as a Hugging Face config, written from a ModelSpec.

Reading goes through a config dictionary and `spec_from_config`, so a shape is checked in one place whatever it came
from. What GGUF leaves to llama.cpp's source is filled in here: Gemma's query scale, Llama-3's rope (stored as its
finished divisors), which tensors mean a bias. Keys that ask for a computation that the decoder lacks are refused.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tightfit.errors import UserError
from tightfit.models.gguf.file import GgufFile
from tightfit.models.huggingface.config import spec_from_config
from tightfit.models.spec import ModelSpec

NEEDED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
USUAL = {
    "feed_forward_length": "intermediate_size",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
GPT2 = {
    "block_count": "n_layer",
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "feed_forward_length": "n_inner",
}
GEMMA2 = {
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "final_logit_softcapping": "final_logit_softcapping",
}
QWEN_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
REFUSED = (
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "expert_weights_scale",
    "expert_group_count",
    "attention.relative_buckets_count",
)
"""Keys of models that llama.cpp computes in ways the decoder does not."""
SCALINGS = ("none", "linear", "yarn")
"""Rope scalings that metadata alone describe; Llama-3's and LongRoPE are stored as tensors."""
TRAINED = "original_max_position_embeddings"
META_LENGTH = 8192
"""Positions that every Llama-3 was trained on before its rope was scaled."""
BLEND_ROUNDING = 1e-5


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One value of `general.architecture`: its family, config fields by GGUF key, and `fixed` fields without a key."""

    model_type: str
    needed: Mapping[str, str] = field(default_factory=lambda: NEEDED)
    usual: Mapping[str, str] = field(default_factory=lambda: USUAL)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)
    """Config flags, and the tensor whose presence sets them."""
    scalar_layers: int = 0
    """Gemma: the model of this depth scales queries by hidden size per head and not by head size."""
    interleaved: bool = False
    """Query and key rows alternate between the halves of a head (llama.cpp rotates neighbours)."""


_ATTENTION_BIAS = {"attention_bias": "blk.0.attn_q.bias"}

ARCHITECTURES = {
    "llama": Architecture(
        model_type="llama", biases=_ATTENTION_BIAS | {"mlp_bias": "blk.0.ffn_up.bias"}, interleaved=True
    ),
    "qwen2": Architecture(model_type="qwen2", fixed={"use_sliding_window": False}),
    "qwen3": Architecture(model_type="qwen3", fixed={"use_sliding_window": False}, biases=_ATTENTION_BIAS),
    "qwen2moe": Architecture(
        model_type="qwen2_moe",
        usual=USUAL | QWEN_EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        fixed={"use_sliding_window": False, "norm_topk_prob": False},
        biases={"qkv_bias": "blk.0.attn_q.bias"},
    ),
    "qwen3moe": Architecture(
        model_type="qwen3_moe",
        usual=USUAL | QWEN_EXPERTS,
        fixed={"use_sliding_window": False, "norm_topk_prob": True},
        biases=_ATTENTION_BIAS,
    ),
    "gemma": Architecture(model_type="gemma"),
    "gemma2": Architecture(
        model_type="gemma2",
        usual=USUAL | GEMMA2 | {"attn_logit_softcapping": "attn_logit_softcapping"},
        scalar_layers=46,
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        usual=USUAL | GEMMA2 | {"rope.freq_base_swa": "rope_local_base_freq"},
        scalar_layers=62,
    ),
    "phi3": Architecture(model_type="phi3", usual=USUAL | {"attention.sliding_window": "sliding_window"}),
    "gpt2": Architecture(model_type="gpt2", needed=GPT2, usual={}),
}


def architecture_of(file: GgufFile) -> Architecture:
    """The row of the file's architecture."""
    name = file.metadata.get("general.architecture")
    if file.metadata.get("split.count", 0) not in (0, 1):
        raise UserError(f"{file.path} is one part of several; join them with llama-gguf-split --merge")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UserError(f"{file.path} holds a model of architecture {name!r}; supported are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def gguf_spec(file: GgufFile) -> ModelSpec:
    """The shape of the model in `file`; refused where the file's tensors are too few or too small for it."""
    config = _config(file)
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    if isinstance(layers, int) and layers > len(file.tensors):
        raise UserError(f"{file.path} is damaged: it announces {layers} layers and holds {len(file.tensors)} tensors")
    spec = spec_from_config(config, str(file.path))
    held = sum(tensor.elements for tensor in file.tensors.values())
    if spec.params() > held:
        raise UserError(f"{file.path} is damaged: its model has {spec.params()} parameters, its tensors only {held}")
    return spec


def _config(file: GgufFile) -> dict[str, Any]:
    """The metadata as a config.json would say it."""
    row, name = architecture_of(file), file.metadata["general.architecture"]
    found = {key.removeprefix(f"{name}."): _short(value) for key, value in file.metadata.items()}
    for key in row.needed:
        if key not in found:
            raise UserError(f"{file.path} has no {name}.{key} in its metadata, which its model cannot do without")
    for key in REFUSED:
        if found.get(key):
            raise UserError(f"{file.path} sets {name}.{key} to {found[key]!r}, which the decoder does not do")
    config = {"model_type": row.model_type, "tie_word_embeddings": "output.weight" not in file.tensors}
    config |= {named: found[key] for key, named in {**row.needed, **row.usual}.items() if key in found}
    config |= {flag: tensor in file.tensors for flag, tensor in row.biases.items()} | dict(row.fixed)
    if "token_embd.weight" not in file.tensors:
        raise UserError(f"{file.path} has no token_embd.weight, so it holds no language model")
    config["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    if row.model_type == "gpt2":
        return config
    _fill_heads(config, row)
    config |= _rope(found, file, config)
    if found.get("expert_count") and name == "llama":
        config |= {"model_type": "mixtral", "num_local_experts": found["expert_count"], "sliding_window": None}
        config["num_experts_per_tok"] = found.get("expert_used_count")
    return config


def _short(value: Any) -> Any:
    """Stored float32 numbers as people write them: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) and abs(value) < 1e30 else value


def _fill_heads(config: dict[str, Any], row: Architecture) -> None:
    """Fill in what GGUF leaves out because llama.cpp derives it; transformers would take a family's default instead."""
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        values = config.get(name)
        if isinstance(values, list) and len(set(values)) == 1:  # given per layer
            config[name] = values[0]
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    config.setdefault("num_key_value_heads", heads)
    if not isinstance(heads, int) or not isinstance(hidden, int) or heads < 1:
        return  # spec_from_config says what is wrong with them
    config.setdefault("head_dim", hidden // heads)
    if row.scalar_layers:
        per_head = config["num_hidden_layers"] == row.scalar_layers
        config["query_pre_attn_scalar"] = hidden // heads if per_head else config["head_dim"]
    if config.get("sliding_window") == 0:
        config["sliding_window"] = None
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, list):
        del config["sliding_window_pattern"]
        config["layer_types"] = ["sliding_attention" if windowed else "full_attention" for windowed in pattern]


def _rope(found: dict[str, Any], file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Base, rotated share and scaling of the rotary positions."""
    fields = {"rope_theta": config.get("rope_theta", 10_000.0)}
    rotated, head = found.get("rope.dimension_count"), config.get("head_dim")
    if isinstance(rotated, int) and isinstance(head, int) and head > 0 and rotated != head:
        fields["partial_rotary_factor"] = rotated / head
    kind = found.get("rope.scaling.type", "none")
    trained = found.get("rope.scaling.original_context_length")
    if "rope_factors_long.weight" in file.tensors:
        lists = {f"{x}_factor": _vector(file, f"rope_factors_{x}.weight").tolist() for x in ("short", "long")}
        factor = found.get("rope.scaling.attn_factor")
        return fields | {
            TRAINED: trained,
            "rope_scaling": {"rope_type": "longrope", "attention_factor": factor, **lists},
        }
    if "rope_freqs.weight" in file.tensors:
        divisors = _vector(file, "rope_freqs.weight")
        return fields | {"rope_scaling": llama3_rule(divisors, fields["rope_theta"], file.path)}
    if kind in SCALINGS[1:]:
        scaling = {"rope_type": kind, "factor": found.get("rope.scaling.factor")}
        return fields | {"rope_scaling": scaling | ({} if trained is None else {TRAINED: trained})}
    if kind != "none" and kind != "longrope":
        raise UserError(f"{file.path} scales its rope by {kind!r}; supported are none, linear, yarn and longrope")
    return fields


def _vector(file: GgufFile, name: str) -> NDArray[np.float32]:
    if name not in file.tensors or len(file.tensors[name].shape) != 1:
        raise UserError(f"{file.path} is damaged: {name} is missing or no vector")
    return file.read(name)


def llama3_rule(divisors: NDArray[np.float32], theta: Any, path: Path) -> dict[str, Any]:
    """Llama-3's scaling rule from the divisors it gave: with the constants of Meta's models, or else with others that
    give the same divisors."""
    if not isinstance(theta, float | int) or theta <= 1:
        raise UserError(f"{path} has rope base {theta!r}; it must be above 1")
    if len(divisors) and np.isfinite(divisors).all() and (divisors > 0).all():
        for low, high in ((1.0, 4.0), _band(divisors.astype(np.float64), float(theta))):
            rule = {"factor": float(divisors[-1]), "low_freq_factor": low, "high_freq_factor": high}
            if 0 < low < high and _gives(rule, divisors, float(theta)):
                return {"rope_type": "llama3", **rule, TRAINED: META_LENGTH}
    raise UserError(f"{path} scales its rope by divisors that are not Llama-3's, which is not supported")


def _gives(rule: dict[str, float], divisors: NDArray[np.float32], theta: float) -> bool:
    """Whether these are the divisors of `rule`."""
    return np.allclose(divisors, llama3_divisors(len(divisors), theta, rule | {TRAINED: META_LENGTH}), rtol=1e-4)


@np.errstate(all="ignore")  # divisors that no rule gives may divide by zero
def _band(divisors: NDArray[np.float64], theta: float) -> tuple[float, float]:
    """`low_freq_factor` and `high_freq_factor` of divisors, for models trained on META_LENGTH positions.

    Only the ratios of low, high and trained length matter. Over 1 / wave the blend of frequencies is a line from 0, at
    `low` / trained, to 1, at `high` / trained. Where fewer than two waves are blended, several lines give these
    divisors: one of them is the steepest between neighbours.
    """
    inverse_waves = theta ** (-np.arange(len(divisors)) / len(divisors)) / (2 * math.pi)
    factor = divisors[-1]
    blend = (1 / divisors - 1 / factor) / (1 - 1 / factor) if factor != 1 else np.zeros_like(divisors)
    blend[np.abs(blend) < BLEND_ROUNDING], blend[np.abs(blend - 1) < BLEND_ROUNDING] = 0, 1
    blended = np.flatnonzero((blend > 0) & (blend < 1))
    if not blend.any():  # all are divided by the factor
        return META_LENGTH * float(inverse_waves[0]), 2 * META_LENGTH * float(inverse_waves[0])
    steepest = int((np.diff(blend) / np.diff(inverse_waves)).argmax())
    one, other = (blended[0], blended[-1]) if len(blended) > 1 else (steepest, steepest + 1)
    slope = (blend[one] - blend[other]) / (inverse_waves[one] - inverse_waves[other])
    low = META_LENGTH * (inverse_waves[one] - blend[one] / slope)
    return float(low), float(low + META_LENGTH / slope)


def llama3_divisors(pairs: int, theta: float, rule: Mapping[str, float]) -> NDArray[np.float32]:
    """What each frequency is divided by: `factor` for long waves, 1 for short ones, blended between."""
    low, high, trained = rule["low_freq_factor"], rule["high_freq_factor"], rule[TRAINED]
    waves = 2 * math.pi * theta ** (np.arange(pairs) / pairs)
    blend = np.clip((trained / waves - low) / (high - low), 0, 1)
    return (1 / ((1 - blend) / rule["factor"] + blend)).astype(np.float32)


WRITTEN = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""The families that can be written, and their architecture in GGUF."""


def metadata_of(spec: ModelSpec) -> dict[str, Any]:
    """`spec` as GGUF metadata, for the families in WRITTEN."""
    name = WRITTEN.get(spec.family)
    if name is None:
        raise UserError(
            f"{spec.family} models cannot be written to GGUF, only {', '.join(WRITTEN)} can; export a directory and "
            "convert it with llama.cpp's own script (convert_hf_to_gguf)"
        )
    if spec.window_layers:
        raise UserError(f"this model looks through a window of {spec.window} tokens, which its GGUF form cannot say")
    assert spec.rope is not None
    rope = spec.rope
    known = {"none", "llama3"} if {name for name, _ in rope.factors} - {"factor", TRAINED} else {*SCALINGS, "llama3"}
    if rope.scaling not in known:
        raise UserError(f"this model's {rope.scaling} rope scaling cannot be said in its GGUF form")
    fields: dict[str, Any] = {
        "block_count": spec.layers,
        "context_length": spec.max_positions,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.mlp_size,
        "attention.head_count": spec.heads,
        "attention.head_count_kv": spec.kv_heads,
        "attention.layer_norm_rms_epsilon": spec.norm_eps,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "rope.dimension_count": spec.head_dim,
        "rope.freq_base": rope.theta,
        "vocab_size": spec.vocab_size,
    }
    if rope.scaling in SCALINGS[1:]:
        fields |= {"rope.scaling.type": rope.scaling, "rope.scaling.factor": rope.factor("factor")}
        trained = rope.factor(TRAINED)
        fields |= {} if trained is None else {"rope.scaling.original_context_length": int(trained)}
    return {"general.architecture": name} | {f"{name}.{key}": value for key, value in fields.items()}
