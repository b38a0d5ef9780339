"""config.json to ModelSpec and back, for every family in `families.py`, without transformers.

Reading gives missing fields the defaults transformers gives them and refuses, with a sentence, whatever it cannot
represent: silently ignoring a field that changes the computation would load weights into a different model. Writing
reads its own result back and compares, so a spec its family cannot express is an error and never a wrong file.
"""

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from dataclasses import fields as dataclass_fields
from typing import Any

from tightfit.errors import UserError
from tightfit.models.huggingface.families import FAMILIES, Family, Names, WindowRule
from tightfit.models.huggingface.fields import Fields
from tightfit.models.huggingface.rope import LONGEST, read_ropes, write_ropes
from tightfit.models.spec import Activation, Experts, Latent, ModelSpec, Rope

DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu2": "relu2",
}
_LARGEST = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "layers": 10_000,
    "heads": 2**16,
    "kv_heads": 2**16,
    "head_dim": 2**16,
    "mlp_size": 2**24,
    "max_positions": LONGEST,
    "count": 2**16,
    "per_token": 2**16,
    "shared_size": 2**24,
}
_FLAGS = ("tied", "qkv_bias", "output_bias", "mlp_bias", "normalise")
_FULL, _SLIDING = "full_attention", "sliding_attention"
_WINDOW = "sliding_window"


def spec_from_config(config: Mapping[str, Any], source: str) -> ModelSpec:
    """The shape that `config` describes; `source` names it in errors."""
    model_type, config = _text_part(config, source)
    family = FAMILIES[model_type]
    fields = Fields(config, source, family.defaults)
    _refuse_unknown_computation(fields, family)
    values: dict[str, Any] = {name: _read(fields, name, names, family) for name, names in family.fields.items()}
    if family.latent is not None:
        values |= _read_latent(fields, family.latent)
    _derive(fields, values)
    if family.scales_embedding:
        values["embedding_scale"] = values["hidden_size"] ** 0.5
    if values.get("attention_scale") == values["head_dim"] ** -0.5:
        values["attention_scale"] = None
    values["window"], values["window_layers"] = _read_windows(fields, family, values["layers"])
    values["experts"] = _read_experts(fields, family, values["layers"])
    if "rope" not in family.fixed:
        latent: Latent | None = values.get("latent")
        rotated = values["head_dim"] if latent is None else latent.rope_dim
        ropes = read_ropes(fields, family, rotated, values["max_positions"])
        values["rope"], values["local_rope"] = ropes
        if latent is not None:
            values["attention_scale"] = _latent_scale(ropes[0], values["head_dim"])
    try:
        return ModelSpec(family=model_type, **values, **family.fixed)
    except UserError as error:
        raise UserError(f"{error} (in {source})") from None


def config_from_spec(spec: ModelSpec, *, dtype: str, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The config.json of `spec`; `extra` adds fields such as token ids."""
    if dtype not in DTYPES:
        raise UserError(f"dtype is {dtype!r}; use one of {', '.join(DTYPES)}")
    spec, family = spec.as_saved, _family(spec.family, "the model's spec")
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": spec.family, "torch_dtype": dtype}
    config |= {names[0]: _written(spec, name, family) for name, names in family.fields.items()}
    config |= _write_windows(spec, family)
    config |= _write_experts(spec.experts, family)
    config |= _write_latent(spec, family)
    config |= write_ropes(family, spec.rope, spec.local_rope)
    # Null rather than absent: the defaults of transformers are token ids that need not even be in the vocabulary.
    config |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config |= extra or {}
    _check_written(config, spec)
    return config


def _check_written(config: dict[str, Any], spec: ModelSpec) -> None:
    read = spec_from_config(config, f"the config.json of this {spec.family} model")
    for name in (field.name for field in dataclass_fields(ModelSpec)):
        wanted, got = getattr(spec, name), getattr(read, name)
        if wanted != got:
            raise UserError(
                f"a {spec.family} config.json cannot say {name} = {reprlib.repr(wanted)} "
                f"(it would read {reprlib.repr(got)}); "
                "choose a family that has it or change the model"
            )


def _family(model_type: Any, source: str) -> Family:
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise Fields({}, source).bad("model_type", model_type, f"supported families are {supported}")
    return FAMILIES[model_type]


def _text_part(config: Mapping[str, Any], source: str) -> tuple[str, Mapping[str, Any]]:
    """The family and its fields: of a multimodal Gemma-3, those of its text model."""
    if not isinstance(config, Mapping):
        raise UserError(f"{source} holds a {type(config).__name__}; a model config is an object with named fields")
    model_type = config.get("model_type")
    if model_type == "gemma3":
        text = Fields(config, source).inner("text_config")
        tied = config.get("tie_word_embeddings", True)
        config = {**(text.values if text else {}), "tie_word_embeddings": tied}
        model_type = "gemma3_text"
    _family(model_type, source)
    return str(model_type), config


def _refuse_unknown_computation(fields: Fields, family: Family) -> None:
    for name, wanted in family.insists.items():
        value = fields.get(name)[1]
        if value is not None and value != wanted:
            raise fields.bad(name, value, f"only {'null' if wanted is None else wanted} is supported")


def _read(fields: Fields, name: str, names: Names, family: Family) -> Any:
    """One value of ModelSpec or Experts from the config field that has it."""
    if name in _LARGEST:
        optional = name in ("kv_heads", "head_dim") or names[0] not in family.defaults
        return (fields.maybe_whole if optional else fields.whole)(*names, most=_LARGEST[name])
    if name in _FLAGS:
        return fields.flag(*names)
    if name == "activation":
        return _read_activation(fields, names, family)
    if name == "attention_scale":
        return float(fields.whole(*names, most=LONGEST) ** -0.5)
    if name == "scale":
        return fields.number(*names)
    if name == "balance_weight":
        return fields.number(*names, or_equal=True)
    return (fields.number if name == "norm_eps" else fields.maybe_number)(*names)


def _read_activation(fields: Fields, names: Names, family: Family) -> Activation:
    word = fields.word(*names)
    known = ACTIVATIONS | family.activations
    if word not in known:
        raise fields.bad(names[0], word, f"known activations are {', '.join(known)}")
    return known[word]


def _derive(fields: Fields, values: dict[str, Any]) -> None:
    """Fill in the sizes that a config may leave out because they follow from others."""
    if values.get("kv_heads") is None:
        values["kv_heads"] = values["heads"]
    if values.get("head_dim") is None:
        if values["hidden_size"] % values["heads"]:
            fix = f"it must be given, as hidden size {values['hidden_size']} is no multiple of {values['heads']} heads"
            raise fields.bad("head_dim", None, fix)
        values["head_dim"] = values["hidden_size"] // values["heads"]
    if values["mlp_size"] is None:
        values["mlp_size"] = 4 * values["hidden_size"]


def _written(spec: ModelSpec, name: str, family: Family) -> Any:
    """The config value of the spec's `name`."""
    value = getattr(spec, name)
    if name == "attention_scale":
        return spec.head_dim if value is None else round(value**-2)
    if name == "activation":
        usual = family.defaults[family.fields[name][0]]
        meaning = ACTIVATIONS | family.activations
        return usual if meaning[usual] == value else next(word for word, means in meaning.items() if means == value)
    return value


def _after(fields: Fields, layers: int) -> range:
    return range(fields.whole("max_window_layers", least=0, most=2**31), layers)


def _even_before(fields: Fields, layers: int) -> range:
    return range(0, min(layers, fields.whole("max_window_layers", least=0, most=2**31)), 2)


def _pattern(fields: Fields, layers: int) -> list[int]:
    every = fields.whole("sliding_window_pattern", "_sliding_window_pattern", most=_LARGEST["layers"])
    return [i for i in range(layers) if (i + 1) % every]


_WINDOW_RULES: dict[WindowRule, Callable[[Fields, int], range | list[int]]] = {
    "none": lambda fields, layers: range(0),
    "all": lambda fields, layers: range(layers),
    "after_max_window_layers": _after,
    "even_before_max_window_layers": _even_before,
    "pattern": _pattern,
}


def _read_windows(fields: Fields, family: Family, layers: int) -> tuple[int | None, tuple[int, ...]]:
    """The window and the layers that have it."""
    switched_off = "use_sliding_window" in family.defaults and not fields.flag("use_sliding_window")
    window = None if switched_off or family.windows == "none" else fields.maybe_whole(_WINDOW, most=LONGEST)
    types = _layer_types(fields, layers)
    if types is not None and family.layer_types:
        chosen = tuple(i for i, kind in enumerate(types) if kind == _SLIDING)
    else:
        # Gemma's windowed layers exist whether or not there is a window; elsewhere no window means no such layers.
        chosen = tuple(_WINDOW_RULES[family.windows](fields, layers)) if window or family.windows == "pattern" else ()
        if types is not None and chosen != tuple(i for i, kind in enumerate(types) if kind == _SLIDING):
            raise fields.bad("layer_types", types, "this family has windows in all its layers or in none")
    if chosen and window is None:
        raise fields.bad(_WINDOW, None, f"it must be given, as {len(chosen)} layers are windowed")
    return (window, chosen) if chosen else (None, ())


def _layer_types(fields: Fields, layers: int) -> list[Any] | None:
    types = fields.items("layer_types")
    if types is None:
        return None
    if len(types) != layers:
        raise fields.bad("layer_types", types, f"it must have one entry for each of the {layers} layers")
    for kind in types:
        if kind not in (_FULL, _SLIDING):
            raise fields.bad("layer_types", kind, f"its entries must be {_FULL} or {_SLIDING}")
    return types


def _write_windows(spec: ModelSpec, family: Family) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if family.windows != "none":  # transformers masks windows in families with a pattern even where no layer has one
        config[_WINDOW] = spec.window or (family.defaults[_WINDOW] if family.windows == "pattern" else None)
    if "use_sliding_window" in family.defaults:
        config["use_sliding_window"] = bool(spec.window_layers)
    if family.windows in ("after_max_window_layers", "even_before_max_window_layers"):
        config["max_window_layers"] = min(spec.window_layers, default=spec.layers)
    if family.layer_types:
        config["layer_types"] = [_FULL if spec.window_of(i) is None else _SLIDING for i in range(spec.layers)]
    return config


def _read_experts(fields: Fields, family: Family, layers: int) -> Experts | None:
    if family.experts is None:
        return None
    values = {name: _read(fields, name, names, family) for name, names in family.experts.items()}
    values |= family.fixed_experts
    if "n_shared_experts" in family.defaults:
        return Experts(**values, **_read_deepseek(fields, values, layers))
    dense = set(_whole_list(fields, "mlp_only_layers", layers))
    if "decoder_sparse_step" in family.defaults:
        step = fields.whole("decoder_sparse_step", most=_LARGEST["layers"])
        dense |= {i for i in range(layers) if (i + 1) % step}
    return Experts(**values, dense_layers=tuple(sorted(dense)))


def _read_deepseek(fields: Fields, values: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Groups of experts, shared ones (as one that is wider), and the first layers, which are dense."""
    shared = fields.maybe_whole("n_shared_experts", most=2**10, least=0) or 0
    first_dense = fields.maybe_whole("first_k_dense_replace", most=2**31, least=0) or 0
    limited = fields.word("topk_method") in ("group_limited_greedy", "noaux_tc")
    groups = fields.maybe_whole("n_group", most=2**16) if limited else 1
    chosen = fields.maybe_whole("topk_group", most=2**16) if limited else 1
    return {
        "groups": groups or 1,
        "chosen_groups": chosen or 1,
        "shared_size": shared * values["mlp_size"],
        "dense_layers": tuple(range(min(first_dense, layers))),
    }


def _read_latent(fields: Fields, names: Mapping[str, Names]) -> dict[str, Any]:
    """Latent attention, and the width of a head: what is rotated and what is not."""
    sizes = {name: fields.maybe_whole(*each, most=2**20) or 0 for name, each in names.items()}
    head_dim = sizes.pop("plain_dim") + sizes["rope_dim"]
    return {"latent": Latent(**sizes), "head_dim": head_dim}


def _latent_scale(rope: Rope | None, head_dim: int) -> float | None:
    """The attention scale, in which Yarn's mscale_all_dim counts twice: for queries and for keys; None without it."""
    every = None if rope is None or rope.scaling == "none" else rope.factor("mscale_all_dim")
    factor = None if rope is None else rope.factor("factor")
    if not every or factor is None or factor <= 1:
        return None
    return float(head_dim**-0.5 * (0.1 * every * math.log(factor) + 1.0) ** 2)


def _write_latent(spec: ModelSpec, family: Family) -> dict[str, Any]:
    latent = spec.latent
    if latent is None or family.latent is None:
        return {}
    values = asdict(latent) | {"plain_dim": spec.head_dim - latent.rope_dim}
    return {names[0]: values[name] or None for name, names in family.latent.items()}


def _whole_list(fields: Fields, name: str, below: int) -> list[int]:
    found = fields.items(name) or []
    for item in found:
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < below:
            raise fields.bad(name, item, f"its entries must be whole numbers from 0 to {below - 1}")
    return found


def _write_experts(experts: Experts | None, family: Family) -> dict[str, Any]:
    if experts is None or family.experts is None:
        return {}
    config: dict[str, Any] = {names[0]: getattr(experts, name) for name, names in family.experts.items()}
    if "decoder_sparse_step" in family.defaults:
        config |= {"mlp_only_layers": list(experts.dense_layers), "decoder_sparse_step": 1}
    if "n_shared_experts" in family.defaults:
        config |= _write_deepseek(experts, family)
    return config


def _write_deepseek(experts: Experts, family: Family) -> dict[str, Any]:
    usual = family.defaults["topk_method"]
    limited = "noaux_tc" if usual == "noaux_tc" else "group_limited_greedy"
    return {
        "topk_method": limited if experts.groups > 1 else usual,
        "n_group": experts.groups,
        "topk_group": experts.chosen_groups,
        "n_shared_experts": experts.shared_size // experts.mlp_size,
        "first_k_dense_replace": len(experts.dense_layers),
        "num_nextn_predict_layers": 0,
    }
