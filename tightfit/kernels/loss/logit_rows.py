"""Per row of logits: the statistics that the loss needs and, written over the row, the loss's gradient.

With x a row of h Wᵀ + bias, z = cap(scale · x), p = softmax(z) and y the row's label, the loss is
    L = logsumexp(z) − (1 − ε) z_y − ε/V Σ_v z_v + λ logsumexp(z)²                     (ε smoothing, λ z-loss)
    ∂L/∂x_v = (p_v (1 + 2 λ logsumexp(z)) − (1 − ε) [v = y] − ε/V) · (1 − (z_v/cap)²) · scale
Four numbers per row hold all the loss needs, and they combine across shards of the vocabulary: logsumexp, the label's
logit, the sum of logits and the largest one. So one kernel serves whole rows (read for the statistics, read again for
the gradient, written: three passes, at 95 % of copy bandwidth on an H200) and sharded ones (two launches with a
reduction in between). Terms are summed in float32 and rounded once, when the gradient is stored. Limits: the kernel
reads and writes rows of the buffer up to the row stride, so the padding must hold finite numbers, and it is set to
zero; a stride that is a multiple of 16 elements lets it do so 16 bytes at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tightfit.errors import UserError
from tightfit.kernels.triton_support import tl, triton

IGNORED, ELSEWHERE = -2, -1
"""Targets that are no column: an ignored row; a row whose label is in another rank's shard of the vocabulary."""
LOGSUMEXP, LABEL, SUM, LARGEST = range(4)
"""Rows of the statistics [4, N]."""
Combine = Callable[[Tensor], Tensor]
"""Statistics [4, rows] of this shard of the vocabulary → those of the whole vocabulary."""

BLOCK, WARPS = 4096, 8
"""H200, 4 096 rows of 128 256: 0.78 ms; three passes over them at copy bandwidth are 0.74."""


@dataclass(frozen=True)
class LossTerms:
    """The loss's settings; `softcap` 0 means none."""

    label_smoothing: float = 0.0
    softcap: float = 0.0
    scale: float = 1.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise UserError(f"label_smoothing is {self.label_smoothing}; give a share between 0 and 1")
        if self.softcap < 0.0:
            raise UserError(f"softcap is {self.softcap}; give a positive number, or None for no cap")

    def losses(self, statistics: Tensor, targets: Tensor, vocabulary: int) -> Tensor:
        """The loss of every row from its statistics [4, N]; 0 where the row does not count."""
        total, label, logits_sum, _ = statistics
        loss = total - (1 - self.label_smoothing) * label
        if self.label_smoothing:
            loss = loss - self.label_smoothing / vocabulary * logits_sum
        if self.z_loss:
            loss = loss + self.z_loss * total.square()
        return loss.masked_fill(targets == IGNORED, 0.0)


@dataclass(frozen=True)
class RowLabels:
    """Labels of some rows as columns (or IGNORED, ELSEWHERE), and ∂(total loss)/∂(a row's loss), [1] or [rows]."""

    targets: Tensor
    row_gradient: Tensor
    vocabulary: int

    def of(self, span: slice) -> "RowLabels":
        """The labels and gradients of the rows in `span`."""
        gradient = self.row_gradient if self.row_gradient.numel() == 1 else self.row_gradient[span]
        return RowLabels(self.targets[span], gradient, self.vocabulary)


def read_rows(
    logits: Tensor,
    labels: RowLabels,
    terms: LossTerms,
    *,
    with_gradient: bool,
    combine: Combine | None = None,
    triton: bool = False,
) -> Tensor:
    """Statistics [4, rows] of `logits` [rows, columns], which with `with_gradient` become their own gradient."""
    if not triton:
        return _read_rows_torch(logits, labels, terms, with_gradient, combine)
    statistics = torch.empty(4, logits.shape[0], device=logits.device, dtype=torch.float32)
    alone = combine is None
    _launch(logits, labels, terms, statistics, measure=True, replace=with_gradient and alone)
    if combine is not None:
        statistics = combine(statistics).contiguous()
        if with_gradient:
            _launch(logits, labels, terms, statistics, measure=False, replace=True)
    return statistics


def replace_rows(logits: Tensor, labels: RowLabels, terms: LossTerms, statistics: Tensor) -> None:
    """Turn `logits` into their own gradient by the kernel, from statistics that `read_rows` gave before."""
    _launch(logits, labels, terms, statistics, measure=False, replace=True)


def _read_rows_torch(
    logits: Tensor,
    labels: RowLabels,
    terms: LossTerms,
    with_gradient: bool,
    combine: Combine | None,
) -> Tensor:
    """`read_rows` in torch, with one softmax for everything: logsumexp(z) = z_j − log p_j at the largest logit j."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    z = logits if terms.scale == 1.0 else logits.to(wide) * terms.scale
    z = z if not terms.softcap else torch.tanh(z.to(wide) / terms.softcap) * terms.softcap
    held = (labels.targets >= 0)[:, None]
    column = labels.targets.clamp(min=0)[:, None]
    largest, where = z.max(-1, keepdim=True)
    label = z.gather(-1, column).to(wide).masked_fill(~held, 0.0)
    logits_sum = z.sum(-1, keepdim=True, dtype=wide) if terms.label_smoothing else torch.zeros_like(label)
    overwrites = with_gradient and z is logits and logits.dtype == wide  # new memory would cost as much as the softmax
    p = torch.softmax(z, -1, out=logits) if overwrites else torch.softmax(z, -1, dtype=wide)
    own = largest.to(wide) - p.gather(-1, where).log()
    statistics = torch.cat([own, label, logits_sum, largest.to(wide)], dim=1).T
    statistics = statistics if combine is None else combine(statistics)
    if not with_gradient:
        return statistics
    total = statistics[LOGSUMEXP][:, None]
    counted = (labels.targets != IGNORED)[:, None]
    weight = torch.where(counted, labels.row_gradient.view(-1, 1).to(wide) * terms.scale, 0.0)
    p *= (own - total).exp() * (1 + 2 * terms.z_loss * total) * weight
    p.scatter_add_(-1, column, held.to(wide) * (terms.label_smoothing - 1) * weight)
    if terms.label_smoothing:
        p -= terms.label_smoothing / labels.vocabulary * weight
    if terms.softcap:
        p *= 1 - (z / terms.softcap) ** 2
    if not overwrites:
        logits.copy_(p)
    return statistics


def _launch(
    logits: Tensor,
    labels: RowLabels,
    terms: LossTerms,
    statistics: Tensor,
    *,
    measure: bool,
    replace: bool,
) -> None:
    rows, columns = logits.shape
    if rows == 0:
        return
    row_kernel[(rows,)](
        logits,
        labels.targets,
        labels.row_gradient,
        statistics,
        logits.stride(0),
        int(labels.row_gradient.numel() > 1),
        rows,
        columns,
        terms.scale,
        terms.softcap,
        1.0 - terms.label_smoothing,
        terms.label_smoothing / labels.vocabulary,
        terms.z_loss,
        MEASURE=measure,
        REPLACE=replace,
        HAS_SOFTCAP=terms.softcap > 0,
        SMOOTHED=terms.label_smoothing > 0,
        BLOCK=min(BLOCK, triton.next_power_of_2(columns)),
        num_warps=WARPS,
    )


@triton.jit
def logit(x, scale, softcap, HAS_SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """z = cap(scale · x), with tanh(u) = 1 − 2 / (1 + e^2u)."""
    z = x.to(tl.float32) * scale
    if HAS_SOFTCAP:
        z = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(z * (2.0 * 1.4426950408889634 / softcap))))
    return z


# The row stride stays specialized: that it is a multiple of 16 is what makes loads and stores wide. Columns are masked
# in arithmetic only, as a mask of unknown alignment would cut every access into single elements.
@triton.jit(do_not_specialize=["rows", "columns"])
def row_kernel(  # type: ignore[no-untyped-def]
    logits,
    targets,
    row_gradient,
    statistics,
    row_stride,
    gradient_stride,
    rows,
    columns,
    scale,
    softcap,
    label_weight,
    smoothing_weight,
    z_loss,
    MEASURE: tl.constexpr,
    REPLACE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    SMOOTHED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row: statistics from first to last block, the gradient backwards, as the last are in cache."""
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * row_stride
    offsets = tl.arange(0, BLOCK)
    blocks = tl.cdiv(columns, BLOCK)
    target = tl.load(targets + row)
    if target == -2:
        if REPLACE:
            for block in range(blocks):
                at = block * BLOCK + offsets
                tl.store(line + at, tl.zeros([BLOCK], logits.dtype.element_ty), mask=at < row_stride)
        if MEASURE:
            for number in tl.static_range(4):
                tl.store(statistics + number * rows + row, 0.0)
    else:
        if MEASURE:
            held = (target >= 0) & (target < columns)
            at_label = tl.load(line + target, mask=held, other=0.0)
            label = logit(at_label, scale, softcap, HAS_SOFTCAP)
            label = tl.where(held, label, tl.where(target == -1, 0.0, float("nan")))
            largest = -float("inf")
            exponentials = tl.zeros([BLOCK], tl.float32)
            sums = tl.zeros([BLOCK], tl.float32)
            for block in range(blocks):
                at = block * BLOCK + offsets
                real = at < columns
                x = tl.load(line + at, mask=at < row_stride, other=0.0, eviction_policy="evict_last")
                z = logit(x, scale, softcap, HAS_SOFTCAP)
                if SMOOTHED:
                    sums += tl.where(real, z, 0.0)
                z = tl.where(real, z, -float("inf"))
                higher = tl.maximum(largest, tl.max(z, 0))
                exponentials = exponentials * tl.exp2((largest - higher) * LOG2E) + tl.exp2((z - higher) * LOG2E)
                largest = higher
            total = largest + tl.log2(tl.sum(exponentials, 0)) / LOG2E
            tl.store(statistics + row, total)
            tl.store(statistics + rows + row, label)
            tl.store(statistics + 2 * rows + row, tl.sum(sums, 0))
            tl.store(statistics + 3 * rows + row, largest)
        else:
            total = tl.load(statistics + row)
        if REPLACE:
            tl.debug_barrier()  # the label's logit has been read by all before any is overwritten
            weight = tl.load(row_gradient + row * gradient_stride) * scale
            slope = 1.0 + 2.0 * z_loss * total
            for step in range(blocks):
                at = (blocks - 1 - step) * BLOCK + offsets
                x = tl.load(line + at, mask=at < row_stride, other=0.0, eviction_policy="evict_first")
                z = logit(x, scale, softcap, HAS_SOFTCAP)
                gradient = tl.exp2((z - total) * LOG2E) * slope - smoothing_weight
                gradient -= tl.where(at == target, label_weight, 0.0)
                if HAS_SOFTCAP:
                    gradient *= 1.0 - (z / softcap) * (z / softcap)
                gradient = tl.where(at < columns, gradient * weight, 0.0).to(logits.dtype.element_ty)
                tl.store(line + at, gradient, mask=at < row_stride, eviction_policy="evict_first")
