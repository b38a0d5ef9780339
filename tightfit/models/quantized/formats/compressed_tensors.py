"""compressed-tensors' layouts (llm-compressor, vLLM, transformers): our own directories are written in them.

| format | a module's tensors |
|---|---|
| pack-quantized | weight_packed int32 [out, ⌈in · bits / 32⌉], weight_scale [out, groups], weight_shape |
| | and where asymmetric weight_zero_point int32 [⌈out · bits / 32⌉, groups], or in blocks int8 [out, groups] |
| int-quantized, float-quantized | weight int8 or e4m3 [out, in], weight_scale [out, 1]; with rounded activations |
| | and where these are static input_scale [1] |
| all of these | with one scale for the tensor weight_scale [1], weight_zero_point int8 [1] less 2^(bits − 1) |
| mxfp4-pack-quantized | weight_packed uint8 [out, in / 2], low half first, weight_scale uint8 exponents |
| nvfp4-pack-quantized | the same with e4m3 scales, and weight_global_scale, which divides |

Codes of a directory may differ by module: each scheme is a config group with the names of its modules.
Integers are stored with 2^(bits − 1) added, so that symmetric and asymmetric codes look the same. Asymmetric groups of
g inputs are groups where they are all there is, and blocks of [1, g] beside other codes (`needs_blocks`).
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from tightfit.errors import UserError
from tightfit.kernels.quantized.packing import pack, pack_nibbles, unpack, unpack_nibbles
from tightfit.models.huggingface.weight_names import HEAD_MODULE
from tightfit.models.quantized.coded_weight import CodedWeight
from tightfit.models.quantized.formats.format import NUMBERS, SIZES, WORDS, FileFormat, stored
from tightfit.models.quantized.scheme import Scheme, needs_blocks

EXPONENT_BIAS = 127


class CompressedTensors(FileFormat):
    """`quant_method: compressed-tensors`."""

    name = "compressed-tensors"
    suffixes = (
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_shape",
        "weight_zero_point",
        "weight_global_scale",
        "input_scale",
        "input_zero_point",
    )
    marks = ("weight_scale",)
    dtypes: ClassVar = {
        "weight": (torch.int8, torch.float8_e4m3fn),
        "weight_packed": (*WORDS, torch.uint8),
        "weight_scale": (*NUMBERS, torch.uint8, torch.float8_e4m3fn),
        "weight_shape": SIZES,
        "weight_zero_point": (*WORDS, torch.int8),
        "weight_global_scale": NUMBERS,
    }

    def __init__(self, *, blocks: bool = False) -> None:
        self.blocks = blocks

    def arranged_for(self, schemes: Iterable[Scheme]) -> "CompressedTensors":
        return CompressedTensors(blocks=needs_blocks(schemes))

    def transformers_limit(self, schemes: Mapping[str, Scheme], plain: Iterable[str]) -> str:
        experts = {schemes.get(module) for module in (*schemes, *plain) if ".experts." in module}
        known = set(schemes.values())
        if len(experts) > 1 or (experts == {None} and known and any(scheme.kind != "fp8" for scheme in known)):
            return "experts are not all coded, and alike; let one step code all of them"
        if any(scheme is not None and not scheme.symmetric for scheme in experts):
            return "experts have zero points; use --symmetric"
        if any(scheme is not None and scheme.activations == "int8" for scheme in experts):
            return "experts round their inputs to integers; leave --activations out, or use fp8"
        if any(scheme is not None and scheme.kind == "nvfp4" for scheme in experts):
            return "it drops the scale of a whole matrix that experts in nvfp4 have; use mxfp4 or fp8"
        if len(known) > 1 and any(not scheme.symmetric and scheme.group == 0 for scheme in known):
            return "rows with a zero point are beside other codes; give them a --group, or use --symmetric"
        return ""

    def refuse(self, scheme: Scheme) -> str | None:
        if scheme.kind in ("nf4", "binary") or scheme.outliers:
            return "it has integers without outliers, 8-bit floats and 4-bit floats"
        return "LLM.int8 is bitsandbytes' own" if scheme.activations == "llm.int8" else None

    def encode(self, weight: CodedWeight) -> dict[str, Tensor]:
        if weight.group_of is not None:
            raise UserError("compressed-tensors has no groups out of order; use act_order: static, or the gptq format")
        layout = _layout(weight.scheme)
        if layout in ("mxfp4-pack-quantized", "nvfp4-pack-quantized"):
            return {"weight_packed": pack_nibbles(weight.codes, high_first=False), **weight.coded_scales}
        if layout in ("float-quantized", "int-quantized"):
            codes = weight.codes if layout == "float-quantized" else _centred(weight.codes, weight.scheme)
            inputs = {} if weight.input_scale is None else {"input_scale": weight.input_scale}
            return {"weight": codes, "weight_scale": _file_scale(weight), **inputs}
        tensors = {
            "weight_packed": pack(weight.codes, weight.scheme.bits),
            "weight_scale": _file_scale(weight),
            "weight_shape": torch.tensor(weight.shape),
        }
        if weight.zero is None:
            return tensors
        return tensors | {"weight_zero_point": _file_zero(weight.zero, weight.scheme, packed=not self.blocks)}

    def decode(self, tensors: Mapping[str, Tensor], scheme: Scheme, module: str) -> CodedWeight:
        layout, scale = _layout(scheme), stored(tensors, "weight_scale", module)
        if layout in ("mxfp4-pack-quantized", "nvfp4-pack-quantized"):
            names = ("weight_scale", "weight_global_scale")[: 1 + (scheme.kind == "nvfp4")]
            coded = {name: stored(tensors, name, module) for name in names}
            codes = unpack_nibbles(stored(tensors, "weight_packed", module), high_first=False)
            return CodedWeight(scheme, codes, small_float_scales(coded), coded_scales=coded)
        wide = scale.to(torch.float32)
        wide = wide.view(1, 1) if wide.numel() == 1 else wide.reshape(wide.shape[0], -1)
        if layout in ("float-quantized", "int-quantized"):
            codes = stored(tensors, "weight", module)
            if codes.dtype != (torch.int8 if layout == "int-quantized" else torch.float8_e4m3fn):
                raise UserError(f"{module} is {scheme.describe()} by config.json, but its weight is {codes.dtype}")
            if layout == "int-quantized":
                codes = (codes.to(torch.int16) + scheme.middle).to(torch.uint8)
            return CodedWeight(scheme, codes, wide, input_scale=_input_scale(tensors, scheme, module))
        outputs, inputs = (int(size) for size in stored(tensors, "weight_shape", module).tolist())
        words = stored(tensors, "weight_packed", module)
        if tuple(words.shape) != (outputs, -(-inputs * scheme.bits // 32)):
            raise UserError(
                f"{module} has {list(words.shape)} words for {outputs} × {inputs} codes of {scheme.bits} bits"
            )
        zero = None if scheme.symmetric else _read_zero(stored(tensors, "weight_zero_point", module), scheme, outputs)
        return CodedWeight(scheme, unpack(words, scheme.bits, inputs), wide, zero)

    def config(self, schemes: Mapping[str, Scheme], plain: Iterable[str]) -> dict[str, Any]:
        by_scheme: dict[Scheme, list[str]] = {}
        for module in sorted(schemes, key=lambda name: ".experts." not in name):  # transformers 5.23 reads all experts
            by_scheme.setdefault(schemes[module], []).append(module)  # by the first group that names modules
        layouts = {_layout(scheme) for scheme in by_scheme}
        named = [HEAD_MODULE] if HEAD_MODULE in schemes else []  # for readers to which it is no Linear
        groups = {
            f"group_{i}": {
                "targets": ["Linear", *named] if len(by_scheme) == 1 else names,
                "weights": _weights_args(scheme, blocks=self.blocks),
                "input_activations": _activation_args(scheme),
                "output_activations": None,
                "format": _layout(scheme),
            }
            for i, (scheme, names) in enumerate(by_scheme.items())
        }
        return {
            "quant_method": "compressed-tensors",
            "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": sorted({HEAD_MODULE, *plain} - schemes.keys()),
            "kv_cache_scheme": None,
            **({"dequantize": True} if not self.blocks and _needs_expanding(by_scheme) else {}),
        }


def _needs_expanding(schemes: Iterable[Scheme]) -> bool:
    """Whether transformers has to be told to dequantize weights as it loads them, and loses nothing by it.

    compressed-tensors 0.20 allocates unpacked zero points when a model is loaded packed, so that not even its own
    asymmetric directories load. It dequantizes weights at the first forward pass in any case. Other readers ignore the
    field.
    """
    known = list(schemes)
    packed = any(not scheme.symmetric and scheme.group >= 0 for scheme in known)
    return packed and all(scheme.activations is None for scheme in known)


def _layout(scheme: Scheme) -> str:
    if scheme.kind in ("mxfp4", "nvfp4"):
        return f"{scheme.kind}-pack-quantized"
    if scheme.kind == "fp8":
        return "float-quantized"
    return "int-quantized" if scheme.activations == "int8" else "pack-quantized"


def _file_scale(weight: CodedWeight) -> Tensor:
    """Scales as files have them: of groups in float16, the one of a whole tensor as a vector."""
    if weight.scheme.group < 0:
        return weight.scale.reshape(1)
    return weight.scale.to(torch.float16) if weight.scheme.group > 0 else weight.scale


def _file_zero(zero: Tensor, scheme: Scheme, *, packed: bool) -> Tensor:
    """Zero points as files have them: packed along the outputs, but of blocks and whole tensors numbers themselves."""
    if scheme.group < 0 or not packed:
        numbers = (zero - scheme.middle).to(torch.int8)
        return numbers.reshape(1) if scheme.group < 0 else numbers
    return pack(zero.T.to(torch.uint8), scheme.bits).T.contiguous()


def _read_zero(found: Tensor, scheme: Scheme, outputs: int) -> Tensor:
    """Zero points [outputs, groups], or [1, 1]: the inverse of `_file_zero`."""
    if found.dtype == torch.int8:
        numbers = found.to(torch.float32) + scheme.middle
        return numbers.reshape(1, 1) if found.numel() == 1 else numbers
    rows = outputs if scheme.group >= 0 else 1
    return unpack(found.T.contiguous(), scheme.bits, rows).T.to(torch.float32).contiguous()


def _centred(codes: Tensor, scheme: Scheme) -> Tensor:
    return (codes.to(torch.int16) - scheme.middle).to(torch.int8)


def _weights_args(scheme: Scheme, *, blocks: bool = False) -> dict[str, Any]:
    strategy = "group" if scheme.group > 0 else ("channel" if scheme.group == 0 else "tensor")
    config: dict[str, Any] = {
        "num_bits": scheme.bits,
        "type": "int" if scheme.kind == "int" else "float",
        "symmetric": scheme.symmetric,
        "strategy": "tensor_group" if scheme.kind == "nvfp4" else strategy,
        "group_size": scheme.group if scheme.group > 0 else None,
        "dynamic": False,
    }
    if blocks and scheme.group > 0 and not scheme.symmetric:
        config |= {"strategy": "block", "group_size": None, "block_structure": [1, scheme.group]}
    types = {"mxfp4": "torch.uint8", "nvfp4": "torch.float8_e4m3fn"}
    return config | ({"scale_dtype": types[scheme.kind]} if scheme.kind in types else {})


def _activation_args(scheme: Scheme) -> dict[str, Any] | None:
    if scheme.activations is None:
        return None
    kind = "int" if scheme.activations == "int8" else "float"
    span = "tensor" if scheme.static else "token"
    return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": span, "dynamic": not scheme.static}


def _input_scale(tensors: Mapping[str, Tensor], scheme: Scheme, module: str) -> Tensor | None:
    """The one scale of a module's inputs, where they are rounded statically."""
    if not scheme.static:
        return None
    scale = stored(tensors, "input_scale", module).reshape(-1)
    if scale.numel() != 1 or not scale.is_floating_point() or not bool((scale > 0) & scale.isfinite()):
        raise UserError(f"input_scale of {module} is no number above 0; download the model again")
    if "input_zero_point" in tensors and bool(tensors["input_zero_point"].to(torch.float32).any()):
        raise UserError(f"inputs of {module} have a zero point, though its config says symmetric; such are not read")
    return scale


def small_float_scales(coded: Mapping[str, Tensor]) -> Tensor:
    """The scales of 4-bit floats, float32: 2^(e − 127), or e4m3 divided by the tensor's own."""
    scale = coded["weight_scale"]
    if scale.dtype == torch.uint8:
        return torch.exp2(scale.to(torch.float32) - EXPONENT_BIAS)
    return scale.to(torch.float32) / coded["weight_global_scale"].to(torch.float32)
