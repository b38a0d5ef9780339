"""From the `quantization_config` of a config.json to the Scheme of a module, for every layout. Nothing imports torch.

Configs of other programs are checked as they are read: a UserError names the field that is wrong.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from tightfit.bounded_patterns import PatternError, begins_with
from tightfit.errors import UserError
from tightfit.models.quantized.scheme import FIXED_GROUPS, Scheme

Config = Mapping[str, Any]
GPTQ_BITS = (2, 3, 4, 8)
MOST_PATTERNS = 32
"""The most regular expressions among a file's targets: every module is matched against each."""
FOLDED = {"weight_input", "weight_output"}
"""Places of a transform that is in the stored weights already."""
NF4_SCHEME = Scheme(kind="nf4", bits=4, group=FIXED_GROUPS["nf4"])
INT8_SCHEME = Scheme(bits=8, group=0, activations="llm.int8")


def described_scheme(method: str, config: Config, module: str) -> Scheme:
    """How the quantized `module` is coded in the layout `method`."""
    return _READERS[method](config, module)


def wanted(config: Config, name: str, kind: type, source: str, default: Any = None) -> Any:
    """Field `name` of a quantization_config, of the right type."""
    value = config.get(name, default)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UserError(f"quantization_config says {name} = {value!r:.80}; {source} needs a {kind.__name__} there")
    return value


def _gptq(config: Config, module: str) -> Scheme:
    config = {**config, **_own_settings(config.get("dynamic"), module)}
    bits, group = wanted(config, "bits", int, "gptq"), wanted(config, "group_size", int, "gptq")
    if bits not in GPTQ_BITS:
        raise UserError(f"quantization_config says {bits} bits; GPTQ has {', '.join(map(str, GPTQ_BITS))}")
    return Scheme(bits=bits, group=max(group, 0), symmetric=bool(config.get("sym", True)))


def _own_settings(rules: Any, module: str) -> Config:
    """GPTQModel's `dynamic`: settings of modules that a regular expression names, here those of `module`."""
    if not isinstance(rules, dict):
        return {}
    if len(rules) > MOST_PATTERNS:
        raise UserError(f"quantization_config has more than {MOST_PATTERNS} regular expressions as dynamic settings")
    named = {str(name).removeprefix("+:"): own for name, own in rules.items() if not str(name).startswith("-:")}
    return next((own for name, own in named.items() if isinstance(own, dict) and _matches(name, module)), {})


def _awq(config: Config, module: str) -> Scheme:
    version = config.get("version", "gemm")
    if str(version).lower() != "gemm":
        raise UserError(f"quantization_config says AWQ version {version!r:.80}; the version that is read is gemm")
    group = wanted(config, "group_size", int, "awq")
    return Scheme(bits=wanted(config, "bits", int, "awq"), group=group, symmetric=not config.get("zero_point", True))


def _bitsandbytes(config: Config, module: str) -> Scheme:
    if config.get("load_in_8bit", config.get("_load_in_8bit")):
        return INT8_SCHEME
    kind = config.get("bnb_4bit_quant_type")
    if kind != "nf4":
        raise UserError(f"quantization_config says bitsandbytes 4-bit type {kind!r:.80}; nf4 is what is read")
    return NF4_SCHEME


def _own(config: Config, module: str) -> Scheme:
    known = wanted(config, "modules", dict, "tightfit").get(module)
    if not isinstance(known, dict):
        raise UserError(f"quantization_config says nothing of {module}, though it is quantized")
    kinds = {each.name: type(each.default) for each in fields(Scheme)}
    if strange := sorted(known.keys() - kinds):
        raise UserError(f"quantization_config describes {module} by {', '.join(strange)}; a newer tightfit may read it")
    for name in known.keys() - {"activations"}:
        wanted(known, name, kinds[name], module)
    return Scheme(**known)


def _compressed_tensors(config: Config, module: str) -> Scheme:
    if places := sorted(_transformed_places(config.get("transform_config")) - FOLDED):
        raise UserError(f"quantization_config transforms {' and '.join(places)} at run time; such models are not read")
    groups = wanted(config, "config_groups", dict, "compressed-tensors")
    targets = [(group, target) for group in groups.values() if isinstance(group, dict) for target in _targets(group)]
    if sum(target.startswith("re:") for _, target in targets) > MOST_PATTERNS:
        raise UserError(f"quantization_config has more than {MOST_PATTERNS} regular expressions as targets")
    for group, target in targets:
        if _meant(target, module):
            return _config_group(group)
    raise UserError(f"no config group of quantization_config names {module}, though it is quantized")


def _transformed_places(transforms: Any) -> set[str]:
    """Where a `transform_config` rotates: weights, or what flows through the model."""
    groups = transforms.get("config_groups") if isinstance(transforms, dict) else None
    schemes = groups.values() if isinstance(groups, dict) else ()
    applied = [scheme.get("apply") for scheme in schemes if isinstance(scheme, dict)]
    found = [each for some in applied if isinstance(some, list) for each in some]
    return {str(each.get("location")) for each in found if isinstance(each, dict)}


def _targets(group: Config) -> list[str]:
    found = group.get("targets") or []
    return [target for target in found if isinstance(target, str)] if isinstance(found, list) else []


def _meant(target: str, module: str) -> bool:
    """Whether a config group's target is this module: its name, a regular expression, or every linear layer."""
    return target == "Linear" or target == module or (target.startswith("re:") and _matches(target[3:], module))


def _matches(pattern: str, module: str) -> bool:
    try:
        return begins_with(pattern, module)
    except PatternError as error:
        raise UserError(f"quantization_config has the pattern re:{pattern:.80}, {error}") from None


def _config_group(group: Config) -> Scheme:
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, dict):
        raise UserError("a config group of quantization_config says nothing of weights; such models are not read")
    bits, strategy = wanted(weights, "num_bits", int, "compressed-tensors"), weights.get("strategy")
    spans: dict[Any, Any] = {
        "group": weights.get("group_size"),
        "tensor_group": weights.get("group_size"),
        "block": _block_width(weights.get("block_structure")),
        "channel": 0,
        "tensor": -1,
    }
    if not isinstance(strategy, str) or not isinstance(spans.get(strategy), int):
        raise UserError(
            f"quantization_config scales weights by {_told(weights)}; group, channel, tensor and blocks of one row are "
            "read"
        )
    rounding = _input_rounding(inputs) if isinstance(inputs, dict) else {}
    if weights.get("type") == "int":
        symmetric = bool(weights.get("symmetric", True))
        return Scheme(bits=bits, group=spans[strategy], symmetric=symmetric, **rounding)
    if bits == 8:
        return Scheme(kind="fp8", bits=8, group=spans[strategy], **rounding)
    return Scheme(kind="mxfp4" if spans[strategy] == 32 else "nvfp4", bits=4, group=spans[strategy])


def _block_width(shape: Any) -> int | None:
    """Inputs of a block of one row, which is a group; None of other blocks."""
    width = shape[1] if isinstance(shape, list) and len(shape) == 2 and shape[0] == 1 else None
    return width if isinstance(width, int) and width > 0 else None


def _told(weights: Config) -> str:
    """The strategy of weights, and the shape of its blocks."""
    shape = weights.get("block_structure")
    return f"{weights.get('strategy')!r}" + (f" {shape}" if shape is not None else "")


def _input_rounding(inputs: Config) -> dict[str, Any]:
    """Fields of a Scheme for `input_activations`: a scale per token computed at run time, or one stored per tensor."""
    kind, strategy, dynamic = inputs.get("type"), inputs.get("strategy"), inputs.get("dynamic", False)
    known = (strategy, dynamic) in (("token", True), ("tensor", False))
    if not known or inputs.get("num_bits") != 8 or kind not in ("int", "float") or not inputs.get("symmetric", True):
        told = {name: inputs.get(name) for name in ("num_bits", "type", "strategy", "dynamic", "symmetric")}
        raise UserError(
            f"quantization_config rounds activations by {told}; read are 8 bits, symmetric, dynamic ones a token or "
            "static ones a tensor"
        )
    return {"activations": "int8" if kind == "int" else "fp8", "static": not dynamic}


_READERS: dict[str, Callable[[Config, str], Scheme]] = {
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "tightfit": _own,
}
