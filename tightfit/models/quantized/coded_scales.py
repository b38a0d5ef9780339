"""Decoding of scales that are coded themselves: NF4's (double quantization), those of 4-bit floats, and SpQR's.

A layer keeps them as files have them and decodes them when it is used: in float32 they would take half a bit a weight
more for NF4, one and a half for NVFP4, and three and a half for SpQR, whose groups have 16 weights.
"""

from collections.abc import Mapping

from torch import Tensor

from tightfit.models.quantized.formats.bitsandbytes import nested_scales
from tightfit.models.quantized.formats.compressed_tensors import small_float_scales
from tightfit.models.quantized.formats.own import coded_statistic
from tightfit.models.quantized.scheme import Scheme


def read_scales(scheme: Scheme, coded: Mapping[str, Tensor], outputs: int) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points [outputs, groups] in float32."""
    if scheme.outliers:
        return coded_statistic(coded, "scale", outputs), coded_statistic(coded, "zero", outputs)
    if scheme.kind == "nf4":
        return nested_scales(coded).view(outputs, -1), None
    return small_float_scales(coded), None
