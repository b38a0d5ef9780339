"""Output projection and cross entropy as one operation that never holds all logits.

With hidden states h [N, H], output weights W [V, H] and labels y: L = Σ_n logsumexp(z_n) − z_n[y_n], z = cap(h Wᵀ).
The logits of one 32 k-token sequence over a 128 k vocabulary are 31 GiB in float32. Here a chunk of rows at a time is
projected, reduced to its loss and overwritten by its gradient, so only the gradients of h and W remain (as in Liger):
`logit_chunks.py` has that loop and `logit_rows.py` the formulas. Gradients are computed in forward, up to the incoming
gradient, which backward multiplies in. Losses with reduction="none" have a gradient per row, known only in backward,
where everything is computed a second time.
Limits: no second derivatives; with hidden states and weight of different dtypes it computes in the former's.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.errors import UserError
from tightfit.kernels.loss.cross_entropy import cross_entropy_eager
from tightfit.kernels.loss.logit_chunks import Wanted, read_chunks
from tightfit.kernels.loss.logit_rows import IGNORED, LABEL, LARGEST, LOGSUMEXP, LossTerms, RowLabels
from tightfit.kernels.loss.loss_reduction import Reduction, check_reduction, divisor_of, wide
from tightfit.kernels.loss.sharded_weight import Projection, WeightShards, combiner, localize
from tightfit.kernels.loss.vocab_parallel import VocabularyRows
from tightfit.kernels.operators import below_autograd, on_device_of, operator
from tightfit.kernels.scaled_copy import scaled_copy
from tightfit.kernels.triton_support import use_triton
from tightfit.levers.policy.loss_chunks import chunk_rows, padded

IGNORE = -100
LinearCrossEntropyImpl = Literal["auto", "triton", "torch", "eager"]
CHUNK_BYTES = 256 * 2**20
"""Bytes of logits held at a time, beside those in the memory of the weight's future gradient (logit_chunks.py)."""
FP16_LIFT = 256.0
"""Scale of float16 gradients of logits: p ≈ 1/V is subnormal in float16 from V = 16 384 on, 256 p is not."""


@dataclass
class LossDetails:
    """Per-label results, filled in where passed as `details`, in the shape of the labels; 0 and False where ignored."""

    losses: Tensor | None = None
    correct: Tensor | None = None
    """Whether the label has the largest logit."""
    logsumexp: Tensor | None = None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = IGNORE,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    z_loss: float = 0.0,
    reduction: Reduction = "sum",
    divisor: float | Tensor | None = None,
    details: LossDetails | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    weight_shards: WeightShards = "auto",
    rows: VocabularyRows | None = None,
    impl: LinearCrossEntropyImpl = "auto",
) -> Tensor:
    """Cross entropy (float32 or better) of cap(scale · (hidden Wᵀ + bias)) for hidden [..., H] and labels [...].

    "mean" divides by the labels that count; `divisor` divides the sum by a number of your own, such as the tokens of
    all micro-batches and processes. `weight_shards` says what a sharded weight means (see sharded_weight.py). With
    `rows`, `weight` has these rows of the vocabulary only, and the caller sums the gradient of `hidden` over ranks.
    """
    terms = LossTerms(label_smoothing, softcap or 0.0, scale, z_loss)
    _check(hidden, weight, labels)
    check_reduction(reduction, divisor)
    at = localize(hidden, weight, bias, weight_shards, rows)
    flat, shape = labels.reshape(-1), labels.shape
    projected = _autocast(at.hidden.reshape(-1, at.hidden.shape[-1])).contiguous()
    divided_by = divisor_of(flat, ignore_index, reduction, divisor, projected)
    if impl == "eager":
        if at.group:
            raise UserError("impl is 'eager', which does not split the vocabulary; use impl='torch'")
        losses = linear_cross_entropy_eager(
            projected, at.weight, flat, bias=at.bias, ignore_index=ignore_index, terms=terms
        )
        return losses.view(shape) if reduction == "none" else losses.sum() / divided_by
    targets = at.targets(flat, ignore_index)
    loss, losses, statistics = _dispatch(at, projected, targets, divided_by, terms, reduction, chunk_bytes, impl)
    if details is not None:
        _fill(details, losses.view(shape), statistics.view(4, *shape), (targets != IGNORED).view(shape))
    return losses.view(shape) if reduction == "none" else loss


def linear_cross_entropy_eager(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = IGNORE,
    terms: LossTerms = LossTerms(),  # noqa: B008  (frozen)
) -> Tensor:
    """The reference: all logits at once; the loss of every row."""
    logits = F.linear(hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype))
    return cross_entropy_eager(logits, labels, ignore_index=ignore_index, terms=terms)


def _check(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    if hidden.shape[-1] != weight.shape[-1] or weight.ndim != 2:
        raise UserError(
            f"hidden states {list(hidden.shape)} and weight {list(weight.shape)} must share their last size"
        )
    if hidden.shape[:-1] != labels.shape:
        raise UserError(f"labels are {list(labels.shape)}, one per hidden state of {list(hidden.shape)} is needed")


def _autocast(hidden: Tensor) -> Tensor:
    """Hidden states in the dtype autocast multiplies in, where it is on."""
    kind = hidden.device.type
    return hidden.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else hidden


def _fill(details: LossDetails, losses: Tensor, statistics: Tensor, counted: Tensor) -> None:
    details.losses = losses.detach()
    details.correct = (statistics[LABEL] >= statistics[LARGEST]) & counted
    details.logsumexp = statistics[LOGSUMEXP]


def _dispatch(
    at: Projection,
    hidden: Tensor,
    targets: Tensor,
    divisor: Tensor,
    terms: LossTerms,
    reduction: Reduction,
    chunk_bytes: int,
    impl: Literal["auto", "triton", "torch"],
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, losses and statistics from the operator, which also computes the gradients that will be needed."""
    on_triton = use_triton(impl, hidden)
    grad = torch.is_grad_enabled()
    each = reduction == "none"
    wanted = [grad and x is not None and x.requires_grad for x in (hidden, at.weight, at.bias)]
    rows = rows_at_a_time(hidden, at.weight, chunk_bytes, weight_gradient=wanted[1], triton=on_triton)
    loss, losses, statistics, *_ = _operator(
        hidden,
        at.weight,
        at.bias,
        targets,
        divisor,
        None,
        at.vocabulary,
        terms.label_smoothing,
        terms.softcap,
        terms.scale,
        terms.z_loss,
        rows,
        *(w and not each for w in wanted),
        each,
        on_triton,
        at.group,
    )
    return loss, losses, statistics


def rows_at_a_time(hidden: Tensor, weight: Tensor, chunk_bytes: int, *, weight_gradient: bool, triton: bool) -> int:
    """Rows whose logits fit into `chunk_bytes` plus the memory of the weight's future 16-bit gradient."""
    logit_bytes = hidden.element_size() if triton else hidden.element_size() + wide(hidden).itemsize
    narrow = weight.dtype != wide(hidden)
    free_bytes = weight.numel() * weight.element_size() if weight_gradient and narrow and triton else 0
    most = (chunk_bytes + free_bytes) // (padded(weight.shape[0]) * logit_bytes)
    return chunk_rows(hidden.shape[0], most)


def _lift(dtype: torch.dtype, row_gradient: Tensor) -> Tensor:
    """The power of two that brings the largest row gradient to FP16_LIFT; 1 for formats that need no lift."""
    one = torch.ones_like(row_gradient[:1])
    if dtype != torch.float16 or row_gradient.numel() == 0:
        return one
    largest = row_gradient.abs().amax().clamp(min=1e-30)
    return one * FP16_LIFT / torch.exp2(torch.ceil(torch.log2(largest)))


def _run(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    divisor: Tensor,
    row_gradient: Tensor | None,
    vocabulary: int,
    label_smoothing: float,
    softcap: float,
    scale: float,
    z_loss: float,
    rows: int,
    wants_hidden: bool,
    wants_weight: bool,
    wants_bias: bool,
    each: bool,
    triton: bool,
    group: str,
) -> tuple[Tensor, ...]:
    """Loss, losses [N], statistics [4, N], and gradients up to a factor: of hidden, and sums for weight and bias."""
    terms = LossTerms(label_smoothing, softcap, scale, z_loss)
    gradient = divisor.reciprocal().view(1) if row_gradient is None else row_gradient
    labels = RowLabels(targets, gradient * _lift(hidden.dtype, gradient), vocabulary)
    with on_device_of(hidden):
        statistics, computed = read_chunks(
            hidden,
            weight,
            bias,
            labels,
            terms,
            Wanted(wants_hidden, wants_weight, wants_bias),
            rows=rows,
            combine=combiner(group),
            triton=triton,
        )
    losses = terms.losses(statistics, targets, vocabulary)
    gradients = (hidden.new_empty(0) if x is None else x for x in (computed.hidden, computed.weight, computed.bias))
    return losses.sum() / divisor, losses, statistics, *gradients


def _fake(hidden: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, ...]:
    wants_hidden, wants_weight, wants_bias = others[10:13]
    sums, (N, V) = wide(hidden), (hidden.shape[0], weight.shape[0])
    return (
        hidden.new_empty((), dtype=sums),
        hidden.new_empty(N, dtype=sums),
        hidden.new_empty(4, N, dtype=sums),
        torch.empty_like(hidden) if wants_hidden else hidden.new_empty(0),
        hidden.new_empty(weight.shape, dtype=sums) if wants_weight else hidden.new_empty(0),
        hidden.new_empty(V, dtype=sums) if wants_bias else hidden.new_empty(0),
    )


def _scratch_bytes(hidden: Tensor, weight: Tensor, *others: Any) -> int:
    """Bytes of the logits of a chunk, and without the kernel of their float32 copy."""
    rows, triton = others[9], others[14]
    each = hidden.element_size() + (0 if triton else wide(hidden).itemsize)
    return min(rows, hidden.shape[0]) * padded(weight.shape[0]) * each


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        with below_autograd():
            loss, losses, *others = _operator(*inputs)
        hidden, weight, bias, targets, divisor, _, *ctx.settings = inputs
        ctx.each, ctx.dtypes = ctx.settings[9], [getattr(x, "dtype", None) for x in (hidden, weight, bias)]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(loss if ctx.each else losses, *others)
        kept = (hidden, weight, bias, targets, divisor) if ctx.each else (divisor, *others[1:])
        ctx.save_for_backward(*kept)
        return loss, losses, *others

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        d_loss, d_losses, *_ = grads
        others = (None,) * (len(ctx.settings) + 3)
        if d_loss is not None:
            divisor, *sums = ctx.saved_tensors
            factor = d_loss / _lift(ctx.dtypes[0], divisor.reciprocal().view(1))
        elif d_losses is not None:
            factor, sums = _recompute(ctx, d_losses.contiguous())
        else:
            return None, None, None, *others
        return *_scale(ctx, sums, factor), *others


def _recompute(ctx: Any, row_gradient: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Gradients for reduction="none", from each row's incoming gradient, and the factor they still lack."""
    settings = list(ctx.settings)
    settings[6:10] = [*ctx.needs_input_grad[:3], False]
    _, _, _, *sums = _operator(*ctx.saved_tensors, row_gradient, *settings)
    return 1 / _lift(ctx.dtypes[0], row_gradient), sums


def _scale(ctx: Any, sums: list[Tensor], factor: Tensor) -> list[Tensor | None]:
    """The needed gradients times `factor`, in their inputs' dtypes; in place where the graph is not retained."""
    found: list[Tensor | None] = []
    for x, dtype, needed in zip(sums, ctx.dtypes, ctx.needs_input_grad[:3], strict=True):
        if not needed:
            found.append(None)
        elif x.dtype == dtype and is_last_use(x):
            found.append(x.mul_(factor))
        else:
            found.append(scaled_copy(x, factor, dtype))
    return found


def is_last_use(x: Tensor) -> bool:
    """Whether a saved tensor may be overwritten: backward runs without retain_graph."""
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return type(x) in (Tensor, FakeTensor) and asked is not None and not asked()


_operator = operator(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor divisor, "
    "Tensor? row_gradient, int vocabulary, float label_smoothing, float softcap, float scale, float z_loss, "
    "SymInt rows, bool wants_hidden, bool wants_weight, bool wants_bias, bool each, bool triton, str group) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
    _LinearCrossEntropy,
    _scratch_bytes,
)
