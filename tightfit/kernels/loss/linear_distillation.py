"""Two output projections and a distillation loss as one operation that never holds all logits of either model.

With the student's hidden states h [N, H] and weight W [V, H], the teacher's h' [N, H'] and W' [V, H'], and labels y:

    z = cap(h Wᵀ),  t = cap'(h' W'ᵀ),  p = softmax(z / τ),  q = softmax(t / τ)
    L = Σ_n (1 − α) · CE(z_n, y_n) + α · τ² · D(q_n, p_n)                              (Hinton et al. 2015; τ² as there)

| divergence | D(q, p) | ∂D / ∂(z / τ) |
|---|---|---|
| forward | KL(q ‖ p) | p − q |
| reverse | KL(p ‖ q) | p · (r − Σ p r),  r = log p − log q |
| jsd | β KL(q ‖ m) + (1 − β) KL(p ‖ m),  m = β q + (1 − β) p | (1 − β) · p · (r − Σ p r),  r = log p − log m |

A chunk of rows at a time is projected by both models, reduced to its loss and to ∂L/∂z, and multiplied out, as in
`linear_cross_entropy.py`: gradients are computed in forward, and backward multiplies them by the incoming one. ∂L/∂z is
already divided by the divisor: dividing ∂L/∂h afterwards would round it twice, which in bf16 made its error a third
larger. Rows without a label count in neither term. Where chunks are few, the weight's gradient is summed in 24 bits
(split_sum.py). Limits: no gradient for the teacher, no second derivatives, whole weights only.
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
    DistillationChunks,
    chunk_rows,
    distillation_chunks,
    distillation_row_bytes,
    padded,
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
        row_bytes = distillation_row_bytes(columns, hidden.element_size(), fused=False)
        return DistillationChunks(max(1, chunk_rows(total, chunk_bytes // row_bytes)), sum_bytes=wide(hidden).itemsize)
    narrow = hidden.is_cuda and hidden.dtype == weight.dtype == torch.bfloat16
    return distillation_chunks(total, columns, width, weight.element_size(), chunk_bytes, narrow=narrow)


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
        split = SplitSum(weight) if wants_weight and chunks.sum_bytes < 4 else None
        teacher_hidden = teacher_hidden.to(hidden.dtype) if triton else teacher_hidden
        matrix, taught = weight.to(hidden.dtype), teacher_weight.to(teacher_hidden.dtype)
        d_hidden = torch.empty_like(hidden) if wants_hidden else None
        d_weight: Tensor | None = None
        total = torch.zeros((), device=hidden.device, dtype=wide(hidden))
        scale = divisor.reciprocal() * _lift(hidden.dtype, divisor)
        buffers = _buffers(hidden, matrix, min(chunks.rows, len(labels)), 2) if triton else []
        for span in spans(len(labels), chunks.rows):
            h = hidden[span]
            if triton:
                d_logits, theirs = (buffer[: len(h), : len(matrix)] for buffer in buffers)
                torch.mm(h, matrix.T, out=d_logits)
                torch.mm(teacher_hidden[span], taught.T, out=theirs)
                with on_device_of(hidden):
                    losses = read_pair_rows(d_logits, theirs, labels[span], terms, scale)
            else:
                losses, wide_logits = _read_rows(h @ matrix.T, teacher_hidden[span] @ taught.T, labels[span], terms)
                d_logits = wide_logits.mul_(scale).to(hidden.dtype)
            total += losses.sum()
            if d_hidden is not None:
                write_product(d_hidden[span], d_logits, matrix, wide(hidden))
            if split is not None:
                split.add_product(d_logits.T, h)
            elif wants_weight:
                d_weight = add_product(d_weight, d_logits, h, wide(hidden))
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


def _buffers(hidden: Tensor, weight: Tensor, rows: int, count: int) -> list[Tensor]:
    """Buffers for logits, with zeros where rows are padded."""
    made = [hidden.new_empty(rows, padded(weight.shape[0])) for _ in range(count)]
    for buffer in made:
        buffer[:, weight.shape[0] :] = 0
    return made


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
