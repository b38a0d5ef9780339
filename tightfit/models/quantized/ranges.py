"""Which range the codes of a group span: the choice of scale S and zero point Z.

| rule | range |
|---|---|
| `minmax` | all values: nothing saturates, one outlier widens every step |
| `percentile` | integers: the middle 99.9 % of the values |
| `kl` | integers: all values times the ratio, one for the matrix, whose histogram differs least (Kullback–Leibler) |
| `mse` | all values times the ratio, one for each group, of least squared error, inputs weighed by importance |

Importance is the second moment of the layer's inputs, where calibration has seen any: its diagonal, or all of it, of
which a group uses its own block (the error of the group's part of the output, as AWQ's clipping has it).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tightfit.models.quantized.coded_weight import CodedWeight
from tightfit.models.quantized.rounding import (
    SMALLEST_SCALE,
    StoredScales,
    encode,
    largest_number,
    rounded,
    store_scales,
)
from tightfit.models.quantized.scheme import Scheme

RangeRule = Literal["minmax", "percentile", "kl", "mse"]
RULES: tuple[RangeRule, ...] = ("minmax", "percentile", "kl", "mse")
PERCENTILE = 0.999
RATIOS = tuple(1.05 - 0.025 * i for i in range(29))
"""Parts of the full range that the searches try: 1.05 down to 0.35."""
HISTOGRAM_BINS = 2048


@dataclass(frozen=True)
class Grid:
    """Scales [outputs, groups], zero points where the scheme has them, and how scales are stored."""

    scheme: Scheme
    stored: StoredScales
    zero: Tensor | None
    exact_scale: Tensor | None = None
    """Scales before they are rounded, where codes are chosen for those: NF4 as bitsandbytes makes it."""

    @property
    def scale(self) -> Tensor:
        """Scales as a reader of the file decodes them."""
        return self.stored.scale

    def code(self, weight: Tensor) -> CodedWeight:
        """Round every weight to its nearest code."""
        blocks = in_groups(weight, self.scheme)
        zero = None if self.zero is None else self.zero[..., None]
        scale = self.scale if self.exact_scale is None else self.exact_scale
        codes = encode(blocks, scale[..., None], zero, self.scheme).reshape(weight.shape)
        return CodedWeight(self.scheme, codes, self.scale, self.zero, coded_scales=self.stored.coded)


def in_groups(weight: Tensor, scheme: Scheme) -> Tensor:
    """[outputs, inputs] as [outputs, groups, group], or [1, 1, all] for one scale in all."""
    if scheme.group < 0:
        return weight.reshape(1, 1, -1)
    return weight.reshape(weight.shape[0], scheme.groups(weight.shape[1]), -1)


def fit_grid(
    weight: Tensor,
    scheme: Scheme,
    rule: RangeRule = "minmax",
    importance: Tensor | None = None,
    *,
    largest: Tensor | None = None,
) -> Grid:
    """The grid for a float32 matrix. `importance` weighs the errors of `mse`: [inputs], or [inputs, inputs] for H;
    `largest` is the largest magnitude of what `weight` is a sample of, for one symmetric scale in all."""
    blocks = in_groups(weight, scheme)
    low, high = _span(blocks, scheme, rule)
    if largest is not None and rule != "percentile":
        low, high = -largest.reshape(1, 1), largest.reshape(1, 1)
    if scheme.kind == "binary":  # the best scale of signs is the mean magnitude (Rastegari et al. 2016)
        return Grid(scheme, store_scales(blocks.abs().mean(-1), scheme), None)
    if scheme.kind == "nf4" and rule == "minmax":
        return Grid(scheme, store_scales(high, scheme), None, exact_scale=high.clamp(min=SMALLEST_SCALE))
    if rule in ("minmax", "percentile") or (rule == "kl" and scheme.kind != "int"):
        return _grid(low, high, scheme)
    if rule == "kl":
        ratio = _least_divergence(blocks, low, high, scheme)
        return _grid(low * ratio, high * ratio, scheme)
    ratios = _least_error(blocks, low, high, scheme, importance)
    return _grid(low * ratios, high * ratios, scheme, high / largest_number(scheme))


def _span(blocks: Tensor, scheme: Scheme, rule: RangeRule) -> tuple[Tensor, Tensor]:
    """The ends of every group's range: of its magnitudes where symmetric."""
    if rule == "percentile":
        ends = torch.tensor([1 - PERCENTILE, PERCENTILE], device=blocks.device)
        low, high = torch.quantile(blocks, ends, dim=-1) if blocks.shape[-1] < 2**24 else blocks.aminmax(dim=-1)
    else:
        low, high = blocks.aminmax(dim=-1)
    if not scheme.symmetric:
        return low.clamp(max=0), high.clamp(min=0)  # zero stays a code of its own
    most = torch.maximum(-low, high)
    return -most, most


def _grid(low: Tensor, high: Tensor, scheme: Scheme, whole: Tensor | None = None) -> Grid:
    if scheme.symmetric:
        return Grid(scheme, store_scales(high / largest_number(scheme), scheme, whole), None)
    stored = store_scales(((high - low) / (scheme.levels - 1)).clamp(min=SMALLEST_SCALE), scheme)
    return Grid(scheme, stored, (-low / stored.scale).round().clamp(0, scheme.levels - 1))


def _least_error(blocks: Tensor, low: Tensor, high: Tensor, scheme: Scheme, importance: Tensor | None) -> Tensor:
    """For every group the ratio of its range with the smallest error, weighed by `importance`."""
    measure = _measure(importance, blocks)

    def errors(ratio: float) -> Tensor:
        grid = _grid(low * ratio, high * ratio, scheme, whole)
        zero = None if grid.zero is None else grid.zero[..., None]
        return measure(rounded(blocks, grid.scale[..., None], zero, scheme) - blocks)

    whole = high / largest_number(scheme)
    return best_of(RATIOS, errors, low)


def _measure(importance: Tensor | None, blocks: Tensor) -> Callable[[Tensor], Tensor]:
    """The error of each group [outputs, groups] for errors of its weights Δ: ΔΔᵀ, Δ diag(h) Δᵀ, or Δ H Δᵀ."""
    groups, size = blocks.shape[1:]
    if importance is None or groups * size != len(importance):  # one scale in all mixes rows
        return lambda errors: errors.square().sum(-1)
    if importance.ndim == 1:
        return lambda errors: (errors.square() * importance.view(1, groups, size)).sum(-1)
    own = torch.stack([importance[i : i + size, i : i + size] for i in range(0, groups * size, size)])
    return lambda errors: (torch.bmm(errors.transpose(0, 1), own).transpose(0, 1) * errors).sum(-1)


def best_of(candidates: tuple[float, ...], errors: Callable[[float], Tensor], like: Tensor) -> Tensor:
    """For every element the candidate whose error there is smallest; earlier ones win ties."""
    best, chosen = torch.full_like(like, torch.inf), torch.ones_like(like)
    for candidate in candidates:
        error = errors(candidate)
        better = error < best
        best, chosen = torch.where(better, error, best), torch.where(better, candidate, chosen)
    return chosen


def _least_divergence(blocks: Tensor, low: Tensor, high: Tensor, scheme: Scheme) -> float:
    """The one ratio for which the histogram of all rounded values differs least from that of the values."""
    edge = float(torch.maximum(-low, high).amax().clamp(min=1e-12))
    wanted = _histogram(blocks, edge)

    def divergence(ratio: float) -> float:
        grid = _grid(low * ratio, high * ratio, scheme)
        zero = None if grid.zero is None else grid.zero[..., None]
        shares = _spread(rounded(blocks, grid.scale[..., None], zero, scheme), blocks, edge)
        return float((wanted * (wanted / shares).log()).sum())

    return min(RATIOS, key=divergence)


def _histogram(values: Tensor, edge: float) -> Tensor:
    counts = torch.histc(values.flatten().float(), HISTOGRAM_BINS, -edge, edge) + 1e-3
    return counts / counts.sum()


def _spread(values: Tensor, blocks: Tensor, edge: float) -> Tensor:
    """The histogram of rounded values, each spread evenly over its step, so that few codes leave no empty bins."""
    step = (values - blocks).abs().mean() * 4
    noise = (torch.arange(values.numel(), device=values.device).view_as(values) * 0.6180339887 % 1.0) - 0.5
    return _histogram((values + noise * step).clamp(-edge, edge), edge)
