"""SpQR: a few weights kept in float16, the rest in small groups whose scales are coded too (Dettmers et al. 2023).

Columns are rounded as GPTQ does, in groups of 16 inputs. Before a group is rounded, its outliers are set aside: weights
whose rounding would cost more than a threshold, (w − q(w))² / [U_jj]², where U is the factor of H⁻¹. The group's range
is then that of the others; its scales and zero points, in 3 bits each, share a range over 16 rows. Outliers are stored
sparsely in float16. The threshold is the one that the wanted share of the unrounded matrix's weights exceeds.
There is no low-rank part.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tightfit.compress.recipe import SPQR_GROUP as GROUP
from tightfit.compress.rounding.gptq import inverse_factor, without_dead
from tightfit.models.quantized.coded_weight import CodedWeight, Outliers
from tightfit.models.quantized.formats.own import (
    code_statistic,
    coded_statistic,
    statistic_choices,
    statistic_range,
)
from tightfit.models.quantized.ranges import fit_grid
from tightfit.models.quantized.rounding import SMALLEST_SCALE, decode, encode, rounded
from tightfit.models.quantized.scheme import Scheme


@dataclass(frozen=True, kw_only=True)
class SpqrOptions:
    """The share of weights that are set aside, and how much H is damped."""

    outlier_share: float = 0.01
    damping: float = 0.01


def spqr(weight: Tensor, hessian: Tensor, scheme: Scheme, options: SpqrOptions | None = None) -> CodedWeight:
    """The codes and outliers of a float32 matrix whose inputs have the second moment `hessian`."""
    options = options or SpqrOptions()
    weight, hessian = without_dead(weight, hessian)
    upper = inverse_factor(hessian, options.damping)
    threshold = _threshold(weight, upper, scheme, options.outlier_share)
    left, codes = weight.clone(), torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    is_outlier = torch.zeros(weight.shape, dtype=torch.bool, device=weight.device)
    kept, statistics = torch.zeros_like(weight), []
    for start in range(0, weight.shape[1], GROUP):
        here = slice(start, start + GROUP)
        is_outlier[:, here] = _sensitivity(left[:, here], upper.diagonal()[here], scheme) > threshold
        coded = _group_range(left[:, here], is_outlier[:, here], upper.diagonal()[here], scheme)
        statistics.append(coded)
        scale, zero = (coded_statistic(coded, name, len(left))[:, 0] for name in ("scale", "zero"))
        errors = torch.empty_like(left[:, here])
        for j in range(start, start + GROUP):
            column, aside = left[:, j].clone(), is_outlier[:, j]
            codes[:, j] = encode(column, scale, zero, scheme)
            kept[:, j] = torch.where(aside, column.to(torch.float16).float(), 0)
            decoded = torch.where(aside, kept[:, j], decode(codes[:, j], scale, zero, scheme))
            errors[:, j - start] = (column - decoded) / upper[j, j]
            left[:, j : start + GROUP] -= errors[:, j - start, None] * upper[j, j : start + GROUP]
        left[:, start + GROUP :] -= errors @ upper[here, start + GROUP :]
    return _collected(scheme, codes, statistics, kept, is_outlier)


def _sensitivity(block: Tensor, factor: Tensor, scheme: Scheme) -> Tensor:
    """The cost of rounding each weight of a group, (w − q(w))² / [U_jj]²."""
    plain = Scheme(bits=scheme.bits, group=0, symmetric=False)
    return (fit_grid(block, plain).code(block).dequantize() - block).div(factor).square()


def _threshold(weight: Tensor, upper: Tensor, scheme: Scheme, share: float) -> float:
    """The sensitivity that `share` of the weights exceed."""
    starts = range(0, weight.shape[1], GROUP)
    found = [_sensitivity(weight[:, i : i + GROUP], upper.diagonal()[i : i + GROUP], scheme) for i in starts]
    flat = torch.cat(found, 1).flatten()
    rank = int(len(flat) * (1 - share))
    return float(flat.kthvalue(min(max(rank, 1), len(flat))).values)


def _group_range(block: Tensor, aside: Tensor, factor: Tensor, scheme: Scheme) -> dict[str, Tensor]:
    """Scale and zero point of each row's group, coded: of all pairs of codes, the one whose rounding costs least."""
    low = block.masked_fill(aside, 0).amin(1).clamp(max=0)
    high = block.masked_fill(aside, 0).amax(1).clamp(min=0)
    scale = ((high - low) / (scheme.levels - 1)).clamp(min=SMALLEST_SCALE)
    ranges = {"scale": statistic_range(scale[:, None]), "zero": statistic_range((-low / scale)[:, None])}
    scales, zeros = (statistic_choices(ranges[name], len(block))[:, 0] for name in ("scale", "zero"))  # [rows, 8]
    weights = ~aside / factor.square()
    repeated, costs = block[:, None].expand(-1, zeros.shape[1], -1), []
    for choice in scales.T:  # one scale of every row at a time, with all eight zero points
        tried = rounded(repeated, choice[:, None, None], zeros[:, :, None], scheme)
        costs.append(((tried - repeated).square() * weights[:, None]).sum(-1))
    best = torch.cat(costs, dim=1).argmin(1, keepdim=True)
    codes = {"scale": best // zeros.shape[1], "zero": best % zeros.shape[1]}
    return {key: value for name in codes for key, value in code_statistic(codes[name], ranges[name], name).items()}


def _collected(
    scheme: Scheme, codes: Tensor, statistics: list[dict[str, Tensor]], kept: Tensor, is_outlier: Tensor
) -> CodedWeight:
    columns = is_outlier.nonzero()[:, 1].to(torch.int32)
    starts = torch.zeros(len(codes) + 1, dtype=torch.int32, device=codes.device)
    starts[1:] = is_outlier.sum(1).cumsum(0)
    coded = {name: torch.cat([group[name] for group in statistics]) for name in statistics[0]}
    scale, zero = (coded_statistic(coded, name, len(codes)) for name in ("scale", "zero"))
    outliers = Outliers(starts, columns, kept[is_outlier].to(torch.float16))
    return CodedWeight(scheme, codes, scale, zero, outliers=outliers, coded_scales=coded)
