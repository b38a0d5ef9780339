"""The layout of codes that no public format has: 1-bit weights, and SpQR's outliers with coded scales.

    weight_packed int32 [out, ⌈in · bits / 32⌉]    weight_scale and weight_zero, plain or coded
    outlier_starts int32 [out + 1]    outlier_columns int32 [n]    outlier_values fp16 [n]

SpQR codes scales and zero points in 3 bits each; those of one group of inputs in `SUPER` consecutive rows share a
float16 step and start: weight_scale_codes, weight_zero_codes int32 (packed), weight_scale_range and weight_zero_range
fp16. config.json names the scheme of every module.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.errors import UserError
from tightfit.kernels.quantized.packing import pack, unpack
from tightfit.models.quantized.coded_weight import CodedWeight, Outliers
from tightfit.models.quantized.formats.format import AGAIN, NUMBERS, SIZES, WORDS, FileFormat, stored
from tightfit.models.quantized.scheme import Scheme

SUPER = 16
"""Rows whose scales share a range, group by group."""
SCALE_BITS = 3


class Own(FileFormat):
    """`quant_method: tightfit`."""

    name = "tightfit"
    suffixes = (
        "weight_packed",
        "weight_shape",
        "weight_scale",
        "weight_zero",
        "weight_scale_codes",
        "weight_scale_range",
        "weight_zero_codes",
        "weight_zero_range",
        "outlier_starts",
        "outlier_columns",
        "outlier_values",
    )
    marks = ("weight_packed",)
    dtypes: ClassVar = {
        "weight_packed": WORDS,
        "weight_shape": SIZES,
        "weight_scale": NUMBERS,
        "weight_zero": NUMBERS,
        "weight_scale_codes": WORDS,
        "weight_scale_range": NUMBERS,
        "weight_zero_codes": WORDS,
        "weight_zero_range": NUMBERS,
        "outlier_starts": SIZES,
        "outlier_columns": SIZES,
        "outlier_values": NUMBERS,
    }

    def transformers_limit(self, schemes: Mapping[str, Scheme], plain: Iterable[str]) -> str:
        return "this layout is tightfit's own"

    def refuse(self, scheme: Scheme) -> str | None:
        return None if scheme.kind in ("int", "binary") and scheme.activations is None else "it has integers and signs"

    def encode(self, weight: CodedWeight) -> dict[str, Tensor]:
        tensors = {"weight_packed": pack(weight.codes, weight.scheme.bits), "weight_shape": torch.tensor(weight.shape)}
        if weight.coded_scales:
            tensors |= weight.coded_scales
        else:
            tensors["weight_scale"] = weight.scale.to(torch.float16 if weight.scheme.group > 0 else torch.float32)
            tensors |= {} if weight.zero is None else {"weight_zero": weight.zero.to(torch.float16)}
        if (lost := weight.outliers) is not None:
            tensors |= {f"outlier_{name}": getattr(lost, name) for name in ("starts", "columns", "values")}
        return tensors

    def decode(self, tensors: Mapping[str, Tensor], scheme: Scheme, module: str) -> CodedWeight:
        outputs, inputs = (int(size) for size in stored(tensors, "weight_shape", module).tolist())
        words = stored(tensors, "weight_packed", module)
        if tuple(words.shape) != (outputs, -(-inputs * scheme.bits // 32)):
            raise UserError(f"{module} has {list(words.shape)} words for {outputs} × {inputs} codes")
        coded = {name: t for name, t in tensors.items() if name.endswith(("_codes", "_range"))}
        if (bool(coded), "outlier_starts" in tensors) != (scheme.outliers, scheme.outliers):
            told = "coded scales and outliers" if scheme.outliers else "plain scales and no outliers"
            raise UserError(f"{module} has {told} by config.json, and others in its files; {AGAIN}")
        if coded:
            scale = coded_statistic(coded, "scale", outputs)
            zero: Tensor | None = coded_statistic(coded, "zero", outputs)
        else:
            scale = stored(tensors, "weight_scale", module).to(torch.float32)
            zero = None if scheme.symmetric else stored(tensors, "weight_zero", module).to(torch.float32)
        outliers = None
        if "outlier_starts" in tensors:
            parts = [stored(tensors, f"outlier_{name}", module) for name in ("starts", "columns", "values")]
            _check_outliers(*parts, outputs=outputs, inputs=inputs, module=module)
            outliers = Outliers(*parts)
        return CodedWeight(scheme, unpack(words, scheme.bits, inputs), scale, zero, None, outliers, coded)

    def config(self, schemes: Mapping[str, Scheme], plain: Iterable[str]) -> dict[str, Any]:
        return {"quant_method": "tightfit", "modules": {module: asdict(scheme) for module, scheme in schemes.items()}}


def statistic_range(values: Tensor) -> Tensor:
    """Step and start, float16 [groups, blocks, 2], which `SUPER` rows of scales or zero points share."""
    turned = values.T.contiguous()  # [groups, outputs]
    blocks = F.pad(turned, (0, -turned.shape[1] % SUPER), mode="replicate").view(len(turned), -1, SUPER)
    low = blocks.amin(-1).to(torch.float16)
    step = ((blocks.amax(-1) - low.float()) / (2**SCALE_BITS - 1)).clamp(min=6e-8).to(torch.float16)
    return torch.stack((step, low), dim=-1)


def statistic_choices(ranges: Tensor, outputs: int) -> Tensor:
    """The value of every 3-bit code in each row, float32 [outputs, groups, 8]."""
    codes = torch.arange(2**SCALE_BITS, device=ranges.device, dtype=torch.float32)
    step, low = ranges.to(torch.float32).repeat_interleave(SUPER, dim=1)[:, :outputs].transpose(0, 1).split(1, dim=-1)
    return codes * step + low


def code_statistic(codes: Tensor, ranges: Tensor, name: str) -> dict[str, Tensor]:
    """The codes [outputs, groups] of scales or zero points within `ranges`, as they are stored."""
    padded = F.pad(codes.T.contiguous(), (0, -len(codes) % SUPER))
    return {
        f"weight_{name}_codes": pack(padded.to(torch.uint8), SCALE_BITS),
        f"weight_{name}_range": ranges,
    }


def coded_statistic(coded: Mapping[str, Tensor], name: str, outputs: int) -> Tensor:
    """The scales or zero points that `code_statistic` coded, [outputs, groups] float32."""
    ranges = coded[f"weight_{name}_range"].to(torch.float32)  # [groups, blocks, 2]
    codes = unpack(coded[f"weight_{name}_codes"], SCALE_BITS, ranges.shape[1] * SUPER).to(torch.float32)
    values = codes.view(*ranges.shape[:2], SUPER) * ranges[..., :1] + ranges[..., 1:]
    return values.flatten(1)[:, :outputs].T.contiguous()


def _check_outliers(starts: Tensor, columns: Tensor, values: Tensor, *, outputs: int, inputs: int, module: str) -> None:
    """Refuse indices from a file that point outside the matrix."""
    ordered = len(starts) == outputs + 1 and int(starts[0]) == 0 and bool((starts.diff() >= 0).all())
    inside = len(columns) == len(values) and (
        not len(columns) or 0 <= int(columns.min()) <= int(columns.max()) < inputs
    )
    if not (ordered and inside and int(starts[-1]) == len(columns)):
        raise UserError(f"the outliers of {module} lie outside its matrix; download the model again")
