"""Per row of two models' logits: the distillation loss and, written over the student's row, its gradient.

The formulas are in `linear_distillation.py`. One program reads a row of both models: once for three logsumexps (of z,
of z / τ and of t / τ, the first two from one maximum), once for the sums over the vocabulary of a divergence, and
for reverse KL and JSD once more for the gradient, whose Σ p r is a sum itself. Forward KL writes its gradient in the
second pass. Sums are float32; rows are rounded once, when the gradient is stored. As in `logit_rows.py`, buffers are
read and written up to their row stride: the padding must hold finite numbers and is set to zero.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tightfit.kernels.loss.logit_rows import logit
from tightfit.kernels.triton_support import tl, triton

if TYPE_CHECKING:
    from tightfit.kernels.loss.linear_distillation import DistillationTerms

BLOCK, WARPS = 4096, 8
KINDS = {"forward": 0, "reverse": 1, "jsd": 2}


def read_pair_rows(logits: Tensor, taught: Tensor, labels: Tensor, terms: "DistillationTerms", scale: Tensor) -> Tensor:
    """The loss of every row; `logits` [rows, V] become their own gradient times the one-element tensor `scale`."""
    rows, columns = logits.shape
    losses = torch.empty(rows, device=logits.device, dtype=torch.float32)
    if rows == 0:
        return losses
    pair_row_kernel[(rows,)](
        logits,
        taught,
        labels,
        losses,
        logits.stride(0),
        columns,
        terms.alpha,
        terms.temperature,
        terms.beta,
        terms.softcap or 0.0,
        terms.teacher_softcap or 0.0,
        scale,
        KIND=KINDS[terms.divergence],
        HAS_SOFTCAP=terms.softcap is not None,
        HAS_TEACHER_SOFTCAP=terms.teacher_softcap is not None,
        BLOCK=min(BLOCK, triton.next_power_of_2(columns)),
        num_warps=WARPS,
    )
    return losses


@triton.jit
def _mixture(log_p, log_q, beta):  # type: ignore[no-untyped-def]
    """log(β q + (1 − β) p), from the larger term."""
    LOG2E: tl.constexpr = 1.4426950408889634
    a, b = log_q + tl.log2(beta) / LOG2E, log_p + tl.log2(1.0 - beta) / LOG2E
    larger, smaller = tl.maximum(a, b), tl.minimum(a, b)
    return larger + tl.log2(1.0 + tl.exp2((smaller - larger) * LOG2E)) / LOG2E


@triton.jit(do_not_specialize=["columns"])
def pair_row_kernel(  # type: ignore[no-untyped-def]
    student,
    teacher,
    labels,
    losses,
    row_stride,
    columns,
    alpha,
    tau,
    beta,
    softcap,
    teacher_softcap,
    scale,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TEACHER_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row: logsumexps, then the divergence's sums, then the gradient."""
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    line, taught = student + row * row_stride, teacher + row * row_stride
    offsets = tl.arange(0, BLOCK)
    blocks = tl.cdiv(columns, BLOCK)
    label = tl.load(labels + row)
    if label < 0:
        for block in range(blocks):
            at = block * BLOCK + offsets
            tl.store(line + at, tl.zeros([BLOCK], student.dtype.element_ty), mask=at < row_stride)
        tl.store(losses + row, 0.0)
    else:
        at_label = logit(tl.load(line + label), 1.0, softcap, HAS_SOFTCAP)
        cold = LOG2E / tau
        factor = tl.load(scale)
        largest, taught_largest = -float("inf"), -float("inf")
        plain = tl.zeros([BLOCK], tl.float32)
        soft = tl.zeros([BLOCK], tl.float32)
        taught_soft = tl.zeros([BLOCK], tl.float32)
        for block in range(blocks):
            at = block * BLOCK + offsets
            real = at < columns
            z = logit(tl.load(line + at, mask=at < row_stride, other=0.0), 1.0, softcap, HAS_SOFTCAP)
            t = logit(tl.load(taught + at, mask=at < row_stride, other=0.0), 1.0, teacher_softcap, HAS_TEACHER_SOFTCAP)
            z, t = tl.where(real, z, -float("inf")), tl.where(real, t, -float("inf"))
            higher = tl.maximum(largest, tl.max(z, 0))
            plain = plain * tl.exp2((largest - higher) * LOG2E) + tl.exp2((z - higher) * LOG2E)
            soft = soft * tl.exp2((largest - higher) * cold) + tl.exp2((z - higher) * cold)
            largest = higher
            higher = tl.maximum(taught_largest, tl.max(t, 0))
            taught_soft = taught_soft * tl.exp2((taught_largest - higher) * cold) + tl.exp2((t - higher) * cold)
            taught_largest = higher
        total = largest + tl.log2(tl.sum(plain, 0)) / LOG2E
        soft_total = largest / tau + tl.log2(tl.sum(soft, 0)) / LOG2E
        taught_total = taught_largest / tau + tl.log2(tl.sum(taught_soft, 0)) / LOG2E
        tl.debug_barrier()  # the label's logit has been read by all before any is overwritten
        parts = tl.zeros([BLOCK], tl.float32)
        own = tl.zeros([BLOCK], tl.float32)
        for step in range(blocks):
            at = (blocks - 1 - step) * BLOCK + offsets
            real = at < columns
            z = logit(tl.load(line + at, mask=at < row_stride, other=0.0), 1.0, softcap, HAS_SOFTCAP)
            t = logit(tl.load(taught + at, mask=at < row_stride, other=0.0), 1.0, teacher_softcap, HAS_TEACHER_SOFTCAP)
            log_p, log_q = z / tau - soft_total, t / tau - taught_total
            p, q = tl.exp2(log_p * LOG2E), tl.exp2(log_q * LOG2E)
            if KIND == 0:
                parts += tl.where(real, q * (log_q - log_p), 0.0)
                gradient = (1.0 - alpha) * tl.exp2((z - total) * LOG2E) + alpha * tau * (p - q)
                gradient -= tl.where(at == label, 1.0 - alpha, 0.0)
                if HAS_SOFTCAP:
                    gradient *= 1.0 - (z / softcap) * (z / softcap)
                gradient = tl.where(real, gradient * factor, 0.0).to(student.dtype.element_ty)
                tl.store(line + at, gradient, mask=at < row_stride)
            elif KIND == 1:
                own += tl.where(real, p * (log_p - log_q), 0.0)
            else:
                log_m = _mixture(log_p, log_q, beta)
                parts += tl.where(real, q * (log_q - log_m), 0.0)
                own += tl.where(real, p * (log_p - log_m), 0.0)
        apart, mean = tl.sum(parts, 0), tl.sum(own, 0)
        if KIND == 1:
            apart = mean
        if KIND == 2:
            apart = beta * apart + (1.0 - beta) * mean
        tl.store(losses + row, (1.0 - alpha) * (total - at_label) + alpha * tau * tau * apart)
        if KIND > 0:
            for block in range(blocks):
                at = block * BLOCK + offsets
                z = logit(tl.load(line + at, mask=at < row_stride, other=0.0), 1.0, softcap, HAS_SOFTCAP)
                t = tl.load(taught + at, mask=at < row_stride, other=0.0)
                t = logit(t, 1.0, teacher_softcap, HAS_TEACHER_SOFTCAP)
                log_p, log_q = z / tau - soft_total, t / tau - taught_total
                if KIND == 1:
                    slope = log_p - log_q - mean
                else:
                    slope = (1.0 - beta) * (log_p - _mixture(log_p, log_q, beta) - mean)
                gradient = (1.0 - alpha) * tl.exp2((z - total) * LOG2E) + alpha * tau * slope * tl.exp2(log_p * LOG2E)
                gradient -= tl.where(at == label, 1.0 - alpha, 0.0)
                if HAS_SOFTCAP:
                    gradient *= 1.0 - (z / softcap) * (z / softcap)
                gradient = tl.where(at < columns, gradient * factor, 0.0).to(student.dtype.element_ty)
                tl.store(line + at, gradient, mask=at < row_stride)
