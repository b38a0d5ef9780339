"""Per row of two models' logits: the distillation loss and, written over the student's row, its gradient.

The formulas are in `linear_distillation.py`. One program reads a row of both models: once for three logsumexps (of z,
of z / τ and of t / τ, the first two from one maximum), once for the sums over the vocabulary of a divergence, and
for reverse KL and JSD once more for the gradient, whose Σ p r is a sum itself. Forward KL writes its gradient in the
second pass. Sums are float32; rows are rounded once, when the gradient is stored. Logarithms are of base 2 until the
end, and there is no division, as instructions take longer than memory does: with u = log₂ p, v = log₂ q, d = v − u,

    log₂(p / m) = −log₂(β 2ᵈ + 1 − β),   log₂(q / m) = d + log₂(p / m)

As in `logit_rows.py`, the student's buffer is read and written up to its row stride. The teacher's is read as far, and
may hold anything in its padding.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from tightfit.kernels.loss.logit_rows import logit
from tightfit.kernels.triton_support import has_ptx, tl, triton

if TYPE_CHECKING:
    from tightfit.kernels.loss.linear_distillation import DistillationTerms

BLOCK, WARPS = 4096, 8
KINDS = {"forward": 0, "reverse": 1, "jsd": 2}


def read_pair_rows(
    logits: Tensor, taught: Tensor, labels: Tensor, losses: Tensor, terms: "DistillationTerms", scale: Tensor
) -> None:
    """Write the loss of every row; `logits` [rows, V] become their own gradient times the one-element `scale`.

    `taught`, the teacher's, has the row stride of `logits`.
    """
    rows, columns = logits.shape
    if rows == 0:
        return
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
        ASM=has_ptx(),
        BLOCK=min(BLOCK, triton.next_power_of_2(columns)),
        num_warps=WARPS,
    )


@triton.jit
def _logits(line, at, row_stride, columns, softcap, HAS_SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Logits of a row, and beyond the vocabulary finite numbers whose probability is 0."""
    x = tl.load(line + at, mask=at < row_stride, other=0.0)
    return tl.where(at < columns, logit(x, 1.0, softcap, HAS_SOFTCAP), -1e15)


@triton.jit
def _over_mixture(d, beta, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """log₂(p / m) from d = log₂(q / p) that is at most 100.

    Triton's log2 is 20 instructions, for the last bit and for subnormal numbers. The card's own is one, and wrong by at
    most 2⁻²² between 1/2 and 2 (beyond, relative to the logarithm), less than log p and log q themselves.
    """
    m = beta * tl.exp2(d) + (1.0 - beta)
    if ASM:
        return -tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [m], dtype=tl.float32, is_pure=True, pack=1
        )
    return -tl.log2(m)


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
    ASM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row: logsumexps, then the divergence's sums, then the gradient."""
    LOG2E: tl.constexpr = 1.4426950408889634
    LN2: tl.constexpr = 0.6931471805599453
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
        hard, soft = (1.0 - alpha) * factor, alpha * tau * factor
        largest, taught_largest = -float("inf"), -float("inf")
        plain_sum = tl.zeros([BLOCK], tl.float32)
        own_sum = tl.zeros([BLOCK], tl.float32)
        taught_sum = tl.zeros([BLOCK], tl.float32)
        for block in range(blocks):
            at = block * BLOCK + offsets
            z = _logits(line, at, row_stride, columns, softcap, HAS_SOFTCAP)
            t = _logits(taught, at, row_stride, columns, teacher_softcap, HAS_TEACHER_SOFTCAP)
            higher = tl.maximum(largest, tl.max(z, 0))
            plain_sum = plain_sum * tl.exp2((largest - higher) * LOG2E) + tl.exp2((z - higher) * LOG2E)
            own_sum = own_sum * tl.exp2((largest - higher) * cold) + tl.exp2((z - higher) * cold)
            largest = higher
            higher = tl.maximum(taught_largest, tl.max(t, 0))
            taught_sum = taught_sum * tl.exp2((taught_largest - higher) * cold) + tl.exp2((t - higher) * cold)
            taught_largest = higher
        plain_total = largest * LOG2E + tl.log2(tl.sum(plain_sum, 0))
        own_total = largest * cold + tl.log2(tl.sum(own_sum, 0))
        taught_total = taught_largest * cold + tl.log2(tl.sum(taught_sum, 0))
        tl.debug_barrier()  # the label's logit has been read by all before any is overwritten
        taught_part = tl.zeros([BLOCK], tl.float32)
        own_part = tl.zeros([BLOCK], tl.float32)
        for step in range(blocks):
            at = (blocks - 1 - step) * BLOCK + offsets
            z = _logits(line, at, row_stride, columns, softcap, HAS_SOFTCAP)
            t = _logits(taught, at, row_stride, columns, teacher_softcap, HAS_TEACHER_SOFTCAP)
            u, v = z * cold - own_total, t * cold - taught_total
            p, q, d = tl.exp2(u), tl.exp2(v), v - u
            if KIND == 0:
                taught_part += q * d
                gradient = hard * tl.exp2(z * LOG2E - plain_total) + soft * (p - q)
                gradient -= tl.where(at == label, hard, 0.0)
                if HAS_SOFTCAP:
                    gradient *= 1.0 - (z / softcap) * (z / softcap)
                tl.store(line + at, gradient.to(student.dtype.element_ty), mask=at < row_stride)
            elif KIND == 1:
                own_part -= p * d
            else:
                d = tl.minimum(d, 100.0)
                ratio = _over_mixture(d, beta, ASM)
                taught_part += q * (d + ratio)
                own_part += p * ratio
        apart, mean = tl.sum(taught_part, 0), tl.sum(own_part, 0)
        if KIND == 1:
            apart = mean
        if KIND == 2:
            apart = beta * apart + (1.0 - beta) * mean
            soft *= 1.0 - beta
        tl.store(losses + row, (1.0 - alpha) * (plain_total * LN2 - at_label) + alpha * tau * tau * LN2 * apart)
        if KIND > 0:
            soft *= LN2
            for block in range(blocks):
                at = block * BLOCK + offsets
                z = _logits(line, at, row_stride, columns, softcap, HAS_SOFTCAP)
                t = _logits(taught, at, row_stride, columns, teacher_softcap, HAS_TEACHER_SOFTCAP)
                u, v = z * cold - own_total, t * cold - taught_total
                ratio = u - v if KIND == 1 else _over_mixture(tl.minimum(v - u, 100.0), beta, ASM)
                gradient = hard * tl.exp2(z * LOG2E - plain_total) + soft * (ratio - mean) * tl.exp2(u)
                gradient -= tl.where(at == label, hard, 0.0)
                if HAS_SOFTCAP:
                    gradient *= 1.0 - (z / softcap) * (z / softcap)
                tl.store(line + at, gradient.to(student.dtype.element_ty), mask=at < row_stride)
