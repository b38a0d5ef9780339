"""SpQR's weights rearranged for the kernels that multiply by them (`kernels/quantized/spqr_layout.py`), and back."""

import torch
from torch import Tensor

from tightfit.kernels.quantized.packing import unpack
from tightfit.kernels.quantized.spqr_layout import (
    GROUP,
    SpqrTensors,
    arrange_codes,
    arrange_ranges,
    arrange_statistics,
    can_be_arranged,
    codes_of,
    ranges_of,
    scales_of,
    statistics_of,
)
from tightfit.models.quantized.coded_weight import CodedWeight, Outliers
from tightfit.models.quantized.formats.own import SCALE_BITS, code_statistic
from tightfit.models.quantized.scheme import Scheme


def arranged(weight: CodedWeight) -> SpqrTensors | None:
    """`weight` in the kernels' layout, or None where the kernels do not take it."""
    lost, coded = weight.outliers, weight.coded_scales
    if lost is None or not weight.scheme.outliers or not can_be_arranged(*weight.shape, weight.scheme.bits):
        return None
    scale, zero = (_statistic_codes(coded[f"weight_{name}_codes"], weight.shape[0]) for name in ("scale", "zero"))
    return SpqrTensors(
        words=arrange_codes(weight.codes, weight.scheme.bits),
        statistics=arrange_statistics(scale, zero),
        ranges=arrange_ranges(coded["weight_scale_range"], coded["weight_zero_range"]),
        starts=lost.starts,
        columns=lost.columns.to(torch.uint16),
        values=lost.values,
        changes=_changes(weight, lost),
    )


def _statistic_codes(words: Tensor, rows: int) -> Tensor:
    """Codes of scales or zero points as files have them, [rows, groups]."""
    return unpack(words, SCALE_BITS, rows).T.contiguous()


def _changes(weight: CodedWeight, lost: Outliers) -> Tensor:
    """Outliers minus the values of the codes in their places."""
    rows, columns = lost.rows(), lost.columns.long()
    assert weight.zero is not None
    scale, zero = (statistic[rows, columns // GROUP] for statistic in (weight.scale, weight.zero))
    return (lost.values.float() - (weight.codes[rows, columns].float() - zero) * scale).to(lost.values.dtype)


def coded_of(scheme: Scheme, tensors: SpqrTensors) -> CodedWeight:
    """The inverse of `arranged`."""
    scale, zero = scales_of(tensors)
    coded: dict[str, Tensor] = {}
    for name, codes, ranges in zip(
        ("scale", "zero"), statistics_of(tensors.statistics), ranges_of(tensors.ranges), strict=True
    ):
        coded |= code_statistic(codes, ranges, name)
    outliers = Outliers(tensors.starts, tensors.columns.to(torch.int32), tensors.values)
    return CodedWeight(scheme, codes_of(tensors.words), scale, zero, outliers=outliers, coded_scales=coded)
