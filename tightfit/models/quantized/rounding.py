"""Numbers to codes and back, given their scales: q = clamp(round(w / S + Z), 0, 2^bits − 1), or the nearest in a table.

Codes saturate: what lies outside the range becomes its end. Scales are first rounded to what is stored (float16 for
groups of integers, e4m3, powers of two, 8-bit codes), so that codes are chosen for the scales a reader decodes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tightfit.models.quantized.codebooks import E2M1_LARGEST, E4M3_LARGEST, TABLES, nearest, table
from tightfit.models.quantized.formats.bitsandbytes import code_scales, nested_scales
from tightfit.models.quantized.formats.compressed_tensors import EXPONENT_BIAS, small_float_scales
from tightfit.models.quantized.scheme import Scheme

SMALLEST_SCALE = 2.0**-24
"""The smallest float16 above zero: rows of zeros have some scale too."""


@dataclass(frozen=True)
class StoredScales:
    """Scales as a reader decodes them, and the tensors in which they are coded; empty for plain scales."""

    scale: Tensor
    coded: dict[str, Tensor]


def encode(values: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme) -> Tensor:
    """The codes of `values`; scale and zero point are of shapes that broadcast."""
    ratio = values / scale
    if scheme.kind == "fp8":
        return ratio.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn)
    if scheme.kind in TABLES:
        return nearest(ratio, scheme.kind)
    offset = scheme.middle if zero is None else zero
    return (ratio + offset).round().clamp(0, scheme.levels - 1).to(torch.uint8)


def decode(codes: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme) -> Tensor:
    """What codes stand for."""
    if scheme.kind == "fp8":
        return codes.to(torch.float32) * scale
    if scheme.kind in TABLES:
        return table(scheme.kind, codes.device)[codes.long()] * scale
    return (codes.to(torch.float32) - (scheme.middle if zero is None else zero)) * scale


def rounded(values: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme) -> Tensor:
    """`values` rounded to the numbers that their codes stand for."""
    if scheme.kind != "int":
        return decode(encode(values, scale, zero, scheme), scale, zero, scheme)
    offset = scheme.middle if zero is None else zero
    return (values / scale).add_(offset).round_().clamp_(0, scheme.levels - 1).sub_(offset).mul_(scale)


def largest_number(scheme: Scheme) -> float:
    """The largest magnitude a code of scale 1 stands for: where a range's end is put."""
    if scheme.kind == "int":
        return scheme.middle - 0.5  # between the two ends, −2^(b−1) and 2^(b−1) − 1
    return E4M3_LARGEST if scheme.kind == "fp8" else (E2M1_LARGEST if scheme.kind in ("mxfp4", "nvfp4") else 1.0)


def store_scales(scale: Tensor, scheme: Scheme, whole: Tensor | None = None) -> StoredScales:
    """Scales [outputs, groups] rounded to what is stored; the largest of `whole` sets NVFP4's scale of the tensor."""
    if scheme.kind == "mxfp4":
        exponent = scale.clamp(min=2.0**-126).log2().ceil() + EXPONENT_BIAS
        coded = {"weight_scale": exponent.clamp(0, 254).to(torch.uint8)}
        return StoredScales(small_float_scales(coded), coded)
    if scheme.kind == "nvfp4":
        own = E4M3_LARGEST / (scale if whole is None else whole).amax().clamp(min=1e-30)
        stored = (scale * own).clamp(2.0**-9, E4M3_LARGEST).to(torch.float8_e4m3fn)
        coded = {"weight_scale": stored, "weight_global_scale": own.reshape(1).to(torch.float32)}
        return StoredScales(small_float_scales(coded), coded)
    if scheme.kind == "nf4":
        coded = code_scales(scale)
        return StoredScales(nested_scales(coded).view(scale.shape), coded)
    if scheme.group > 0:
        return StoredScales(scale.clamp(min=SMALLEST_SCALE).to(torch.float16).to(torch.float32), {})
    return StoredScales(scale.clamp(min=1e-30), {})
