"""Two output projections and a distillation loss as one operation that never holds all logits of either model.

With the student's hidden states h [N, H] and weight W [V, H], the teacher's h' [N, H'] and W' [V, H'], and labels y:

    z = cap(h Wᵀ),  t = cap'(h' W'ᵀ),  p = softmax(z / τ),  q = softmax(t / τ)
    L = Σ_n (1 − α) · CE(z_n, y_n) + α · τ² · D(q_n, p_n)                              (Hinton et al. 2015; τ² as there)

| divergence | D(q, p) | ∂D / ∂(z / τ) |
|---|---|---|
| forward | KL(q ‖ p) | p − q |
| reverse | KL(p ‖ q) | p · (r − Σ p r),  r = log p − log q |
| jsd | β KL(q ‖ m) + (1 − β) KL(p ‖ m),  m = β q + (1 − β) p | (1 − β) · p · (r − Σ p r),  r = log p − log m |

A chunk of rows at a time is projected by the student, reduced to its loss and to ∂L/∂z, and multiplied out, as in
`linear_cross_entropy.py`: gradients are computed in forward, and backward multiplies them by the incoming one. Within a
chunk the teacher projects fewer rows at a time, since its logits are done with once they are read: what they leave free
makes the student's chunks larger, and sums over chunks fewer. ∂L/∂z is already divided by the divisor: dividing ∂L/∂h
afterwards would round it twice, which in bf16 made its error a third larger. Rows without a label count in neither
term. Where chunks are few, the weight's gradient is summed in 24 bits (split_sum.py), its products computed where the
teacher's logits were. Limits: no gradient for the teacher, no second derivatives, whole weights only.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.errors import UserError
from tightfit.kernels.loss.cross_entropy import softcapped
from tightfit.kernels.loss.distillation_rows import read_pair_rows
from tightfit.kernels.loss.linear_cross_entropy import CHUNK_BYTES, FP16_LIFT, IGNORE, is_last_use
from tightfit.kernels.loss.logit_chunks import add_product, spans, write_product
from tightfit.kernels.loss.loss_reduction import wide
from tightfit.kernels.loss.split_sum import SplitSum, round_split
from tightfit.kernels.operators import on_device_of
from tightfit.kernels.scaled_copy import scaled_copy
from tightfit.kernels.triton_support import Impl, use_triton
from tightfit.levers.policy.loss_chunks import (
    SPLIT_SUM_BYTES,
    DistillationChunks,
    chunk_rows,
    distillation_chunks,
    padded,
    plain_row_bytes,
)

Divergence = Literal["forward", "reverse", "jsd"]
DIVERGENCES: tuple[Divergence, ...] = ("forward", "reverse", "jsd")


@dataclass(frozen=True, kw_only=True)
class DistillationTerms:
    """α, τ, the divergence and its β, and the softcaps of both models' logits."""

    alpha: float = 0.5
    temperature: float = 2.0
    divergence: Divergence = "forward"
    beta: float = 0.5
    softcap: float | None = None
    teacher_softcap: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1 or self.temperature <= 0 or not 0 < self.beta < 1:
            raise UserError(
                f"alpha is {self.alpha}, temperature {self.temperature} and beta {self.beta}; alpha lies in 0 to 1, "
                "temperature above 0 and beta between 0 and 1"
            )


def linear_distillation(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    labels: Tensor,
    terms: DistillationTerms,
    *,
    divisor: float | Tensor = 1.0,
    chunk_bytes: int = CHUNK_BYTES,
    impl: Impl = "auto",
) -> Tensor:
    """L / divisor for hidden [..., H], teacher_hidden [..., H'] and labels [...]; float32 or better."""
    _check(hidden, weight, teacher_hidden, teacher_weight, labels)
    triton = use_triton(impl, hidden)
    chunks = _chunks(hidden, weight, labels.numel(), chunk_bytes, triton=triton)
    divided_by = torch.as_tensor(divisor, device=hidden.device, dtype=wide(hidden))
    loss: Tensor = _LinearDistillation.apply(
        hidden.reshape(-1, hidden.shape[-1]).contiguous(),
        weight,
        teacher_hidden.reshape(-1, teacher_hidden.shape[-1]),
        teacher_weight,
        labels.reshape(-1),
        terms,
        chunks,
        divided_by,
        triton,
    )
    return loss


def _chunks(hidden: Tensor, weight: Tensor, total: int, chunk_bytes: int, *, triton: bool) -> DistillationChunks:
    """Rows per chunk, whose logits fit into `chunk_bytes` and memory free meanwhile, and how dW is summed."""
    columns, width = weight.shape
    if not triton:
        row_bytes = plain_row_bytes(columns, hidden.element_size())
        rows = max(1, chunk_rows(total, chunk_bytes // row_bytes))
        return DistillationChunks(
            rows=rows, taught_rows=rows, sum_bytes=wide(hidden).itemsize, taught_bytes=0, row_bytes=row_bytes
        )
    narrow = hidden.is_cuda and hidden.dtype == weight.dtype == torch.bfloat16
    element_bytes = max(hidden.element_size(), weight.element_size())
    return distillation_chunks(total, columns, width, element_bytes, chunk_bytes, narrow=narrow)


def linear_distillation_eager(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    labels: Tensor,
    terms: DistillationTerms,
) -> Tensor:
    """The reference: all logits at once, differentiated by autograd; L of every row."""
    tau = terms.temperature
    logits = softcapped(F.linear(hidden, weight.to(hidden.dtype)), terms.softcap)
    taught = softcapped(F.linear(teacher_hidden, teacher_weight), terms.teacher_softcap)
    log_p = (logits.to(wide(hidden)) / tau).log_softmax(-1)
    log_q = (taught.to(wide(hidden)) / tau).log_softmax(-1).detach()
    if terms.divergence == "jsd":
        log_m = (terms.beta * log_q.exp() + (1 - terms.beta) * log_p.exp()).log()
        parts = terms.beta * _kl(log_q, log_m) + (1 - terms.beta) * _kl(log_p, log_m)
    else:
        parts = _kl(log_q, log_p) if terms.divergence == "forward" else _kl(log_p, log_q)
    entropy = F.cross_entropy(logits.to(wide(hidden)), labels, ignore_index=IGNORE, reduction="none")
    losses = (1 - terms.alpha) * entropy + terms.alpha * tau**2 * parts
    return losses.masked_fill(labels == IGNORE, 0)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    return (log_a.exp() * (log_a - log_b)).sum(-1)


def _check(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, labels: Tensor) -> None:
    for states, matrix, whose in ((hidden, weight, "the student's"), (teacher_hidden, teacher_weight, "the teacher's")):
        if states.shape[-1] != matrix.shape[-1] or states.shape[:-1] != labels.shape:
            raise UserError(
                f"{whose} hidden states {list(states.shape)} do not fit its weight {list(matrix.shape)} and labels "
                f"{list(labels.shape)}; give [..., H], [V, H] and [...]"
            )
    if weight.shape[0] != teacher_weight.shape[0]:
        raise UserError(
            f"student and teacher have vocabularies of {weight.shape[0]} and {teacher_weight.shape[0]}; "
            "distillation compares their tokens one by one, so give models of one vocabulary"
        )


class _LinearDistillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        labels: Tensor,
        terms: DistillationTerms,
        chunks: DistillationChunks,
        divisor: Tensor,
        triton: bool,
    ) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        split = SplitSum(weight) if wants_weight and chunks.sum_bytes == SPLIT_SUM_BYTES else None
        d_hidden = torch.empty_like(hidden) if wants_hidden else None
        d_weight: Tensor | None = None
        total = torch.zeros((), device=hidden.device, dtype=wide(hidden))
        scale = divisor.reciprocal() * _lift(hidden.dtype, divisor)
        pairs = _Fused if triton else _Plain
        logits = pairs(hidden, weight, teacher_hidden, teacher_weight, labels, terms, scale, chunks)
        for span in spans(len(labels), chunks.rows):
            losses, d_logits = logits.read(span)
            total += losses.sum()
            if d_hidden is not None:
                write_product(d_hidden[span], d_logits, logits.matrix, wide(hidden))
            if split is not None:
                split.add_product(d_logits.T, hidden[span], logits.spare)
            elif wants_weight:
                d_weight = add_product(d_weight, d_logits, hidden[span], wide(hidden))
        high, low = (None, None) if split is None else (split.high, split.low)
        ctx.save_for_backward(d_hidden, d_weight, divisor, high, low)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total / divisor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, divisor, high, low = ctx.saved_tensors
        factor = grads[0] / _lift(ctx.dtypes[0], divisor)
        made = [
            None if x is None else scaled_copy(x, factor.view(1), dtype)
            for x, dtype in zip((d_hidden, d_weight), ctx.dtypes, strict=True)
        ]
        if high is not None:
            made[1] = round_split(high, low, factor.view(1), in_place=is_last_use(high))
        return *made, *(None,) * 7


class _Plain:
    """Logits of both models, a chunk of rows at a time."""

    spare: Tensor
    """Memory that is free between two calls of `read`."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        labels: Tensor,
        terms: DistillationTerms,
        scale: Tensor,
        chunks: DistillationChunks,
    ) -> None:
        self.hidden, self.matrix = hidden, weight.to(hidden.dtype)
        self.teacher_hidden, self.teacher_matrix = teacher_hidden, teacher_weight.to(teacher_hidden.dtype)
        self.labels, self.terms, self.scale = labels, terms, scale

    def read(self, span: slice) -> tuple[Tensor, Tensor]:
        """Losses of the rows of `span`, and ∂L/∂(h Wᵀ) times `scale`, which the next call may overwrite."""
        logits, taught = self.hidden[span] @ self.matrix.T, self.teacher_hidden[span] @ self.teacher_matrix.T
        losses, gradient = _read_rows(logits, taught, self.labels[span], self.terms)
        return losses, gradient.mul_(self.scale).to(logits.dtype)


class _Fused(_Plain):
    """By the kernel, in two buffers: the teacher's is for fewer rows, which are read one after another."""

    def __init__(self, hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, *others: Any) -> None:
        super().__init__(hidden, weight, teacher_hidden.to(hidden.dtype), *others)
        chunks, columns = others[-1], len(weight)
        self.taught_rows, self.width = chunks.taught_rows, padded(columns)
        self.buffer = hidden.new_empty(chunks.rows, self.width)
        self.buffer[:, columns:] = 0  # where rows are padded
        self.spare = hidden.new_zeros(chunks.taught_bytes // hidden.element_size())

    def read(self, span: slice) -> tuple[Tensor, Tensor]:
        """See _Plain.read."""
        h, g, labels, columns = self.hidden[span], self.teacher_hidden[span], self.labels[span], len(self.matrix)
        logits = self.buffer[: len(h), :columns]
        torch.mm(h, self.matrix.T, out=logits)
        losses = torch.empty(len(h), device=h.device, dtype=torch.float32)
        for part in spans(len(h), self.taught_rows):
            rows = part.stop - part.start
            taught = self.spare[: rows * self.width].view(rows, self.width)[:, :columns]
            torch.mm(g[part], self.teacher_matrix.T, out=taught)
            with on_device_of(h):
                read_pair_rows(logits[part], taught, labels[part], losses[part], self.terms, self.scale)
        return losses, logits


def _lift(dtype: torch.dtype, divisor: Tensor) -> Tensor:
    """The power of two that keeps gradients of logits above float16's smallest numbers; 1 for other formats."""
    return torch.exp2((divisor.abs() * FP16_LIFT).log2().ceil()) if dtype == torch.float16 else torch.ones_like(divisor)


def _read_rows(logits: Tensor, taught: Tensor, labels: Tensor, terms: DistillationTerms) -> tuple[Tensor, Tensor]:
    """The loss of every row and ∂L/∂(h Wᵀ), in float32 or better."""
    tau, counted = terms.temperature, labels != IGNORE
    z = softcapped(logits.to(wide(logits)), terms.softcap)
    at = labels.clamp(min=0)[:, None]
    log_p = z.log_softmax(-1)
    losses = (terms.alpha - 1) * log_p.gather(1, at)[:, 0]
    gradient = log_p.exp_().mul_(1 - terms.alpha)
    gradient.scatter_add_(1, at, gradient.new_full(at.shape, terms.alpha - 1))
    if terms.alpha:
        log_q = (softcapped(taught.to(wide(logits)), terms.teacher_softcap) / tau).log_softmax(-1)
        parts, slope = _divergence((z / tau).log_softmax(-1), log_q, terms)
        losses = losses + terms.alpha * tau**2 * parts
        gradient.add_(slope, alpha=terms.alpha * tau)
    if terms.softcap is not None:
        gradient.mul_(1 - (z / terms.softcap).square_())
    return losses.masked_fill_(~counted, 0), gradient.mul_(counted[:, None])


def _divergence(log_p: Tensor, log_q: Tensor, terms: DistillationTerms) -> tuple[Tensor, Tensor]:
    """D and ∂D/∂(z / τ) of every row; overwrites its inputs."""
    if terms.divergence == "forward":
        q = log_q.exp()
        parts = (log_q.sub_(log_p)).mul_(q).sum(-1)
        return parts, log_p.exp_().sub_(q)
    if terms.divergence == "reverse":
        ratio = log_q.neg_().add_(log_p)
        p = log_p.exp_()
        parts = (p * ratio).sum(-1)
        return parts, ratio.sub_(parts[:, None]).mul_(p)
    beta = terms.beta
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log(1 - beta))
    parts = (log_q.exp() * (log_q - log_m)).sum(-1).mul_(beta)
    ratio = log_m.neg_().add_(log_p)
    p = log_p.exp_()
    own = (p * ratio).sum(-1)
    return parts + (1 - beta) * own, ratio.sub_(own[:, None]).mul_(p).mul_(1 - beta)
