"""Cross entropy of given logits; backward writes the gradient over them.

    L = logsumexp(z) − (1 − ε) z_y − ε/V Σ_v z_v + λ logsumexp(z)²,   z = cap(scale · logits)

Three passes over the logits: one read for the loss, which saves four numbers per row, and in backward one read and one
write for the gradient, in the logits' own memory. A second [N, V] tensor never exists, nor a float32 copy. The gradient
is computed in backward, when the gradient of the loss is known, so no later multiplication is needed. Where the logits
need not exist at all, use `linear_cross_entropy`; both share a row kernel (`logit_rows.py`). Vocabularies that are no
multiple of 16 are read element by element.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tightfit.errors import UserError
from tightfit.kernels.loss.logit_rows import IGNORED, LossTerms, RowLabels, read_rows, replace_rows
from tightfit.kernels.loss.loss_reduction import Reduction, check_reduction, divisor_of, wide
from tightfit.kernels.operators import below_autograd, on_device_of, operator
from tightfit.kernels.triton_support import Impl, use_triton


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    z_loss: float = 0.0,
    reduction: Reduction = "sum",
    divisor: float | Tensor | None = None,
    overwrite: bool = True,
    impl: Impl = "auto",
) -> Tensor:
    """The loss (float32 or better) of logits [..., V] for labels [...]; `ignore_index` marks those that do not count.

    "mean" divides by the labels that count, `divisor` divides the sum by a number of your own. With `overwrite` the
    kernel's backward pass writes the gradient over the logits, unless they are a leaf: use them before, not after.
    """
    terms = LossTerms(label_smoothing, softcap or 0.0, scale, z_loss)
    _check(logits, labels)
    check_reduction(reduction, divisor)
    rows, flat = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    if use_triton(impl, logits):
        targets = flat.masked_fill(flat < 0, logits.shape[-1]).masked_fill(flat == ignore_index, IGNORED)
        overwrite = overwrite and not logits.is_leaf and not torch.compiler.is_compiling()
        losses, _ = _rows_op(rows, targets, label_smoothing, terms.softcap, scale, z_loss, overwrite)
    else:
        losses = cross_entropy_eager(rows, flat, ignore_index=ignore_index, terms=terms)
    if reduction == "none":
        return losses.view(labels.shape)
    return losses.sum() / divisor_of(flat, ignore_index, reduction, divisor, logits)


def cross_entropy_eager(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    terms: LossTerms = LossTerms(),  # noqa: B008  (frozen)
) -> Tensor:
    """The reference, in plain torch: the loss of every row of logits [N, V]."""
    z = softcapped(logits.to(wide(logits)) * terms.scale, terms.softcap)
    smoothing = terms.label_smoothing
    losses = F.cross_entropy(z, labels, ignore_index=ignore_index, label_smoothing=smoothing, reduction="none")
    if not terms.z_loss:
        return losses
    return losses + terms.z_loss * z.logsumexp(-1).square().masked_fill(labels == ignore_index, 0.0)


def softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    """cap · tanh(logits / cap)."""
    return torch.tanh(logits / softcap) * softcap if softcap else logits


def _check(logits: Tensor, labels: Tensor) -> None:
    if logits.shape[:-1] != labels.shape:
        raise UserError(f"labels have shape {tuple(labels.shape)} and logits {tuple(logits.shape)}; give one per row")


def _forward_fake(
    logits: Tensor,
    targets: Tensor,
    label_smoothing: float,
    softcap: float,
    scale: float,
    z_loss: float,
    overwrite: bool,
) -> tuple[Tensor, Tensor]:
    """The loss of every row, and the four statistics that the gradient needs."""
    losses = logits.new_empty(len(targets), dtype=torch.float32)
    return losses, losses.new_empty((4, len(targets)))


def _forward(
    logits: Tensor,
    targets: Tensor,
    label_smoothing: float,
    softcap: float,
    scale: float,
    z_loss: float,
    overwrite: bool,
) -> tuple[Tensor, Tensor]:
    terms, labels = LossTerms(label_smoothing, softcap, scale, z_loss), _labels(logits, targets)
    with on_device_of(logits):
        statistics = read_rows(logits.contiguous(), labels, terms, with_gradient=False, triton=True)
    return terms.losses(statistics, targets, logits.shape[-1]), statistics


def _labels(logits: Tensor, targets: Tensor, d_losses: Tensor | None = None) -> RowLabels:
    gradient = logits.new_empty(1, dtype=torch.float32) if d_losses is None else d_losses.contiguous()
    return RowLabels(targets, gradient, logits.shape[-1])


def _overwriting_backward(
    d_losses: Tensor,
    logits: Tensor,
    targets: Tensor,
    statistics: Tensor,
    label_smoothing: float,
    softcap: float,
    scale: float,
    z_loss: float,
) -> None:
    terms = LossTerms(label_smoothing, softcap, scale, z_loss)
    with on_device_of(logits):
        replace_rows(logits, _labels(logits, targets, d_losses), terms, statistics)


def _backward(d_losses: Tensor, logits: Tensor, *rest: Any) -> Tensor:
    gradient = logits.clone(memory_format=torch.contiguous_format)
    _overwriting_backward(d_losses, gradient, *rest)
    return gradient


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, *terms: Any) -> tuple[Tensor, Tensor]:
        with below_autograd():
            losses, statistics = _rows_op(logits, targets, *terms)
        ctx.save_for_backward(logits, targets, statistics)
        ctx.terms, ctx.overwrite = terms[:-1], terms[-1]
        ctx.mark_non_differentiable(statistics)
        return losses, statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_losses: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, statistics = ctx.saved_tensors
        nothing = [None] * (2 + len(ctx.terms))
        if not (ctx.overwrite and logits.is_contiguous()):
            return _backward_op(d_losses, logits, targets, statistics, *ctx.terms), *nothing
        _overwriting_backward_op(d_losses, logits, targets, statistics, *ctx.terms)
        torch.autograd.graph.increment_version(logits)  # a second backward pass must not find a gradient here
        return logits.detach(), *nothing


_TERMS = "float label_smoothing, float softcap, float scale, float z_loss"
_overwriting_backward_op = operator(
    f"cross_entropy_backward_(Tensor d_losses, Tensor(a!) logits, Tensor targets, Tensor statistics, {_TERMS}) -> ()",
    _overwriting_backward,
    lambda *_: None,
)
_backward_op = operator(
    f"cross_entropy_backward(Tensor d_losses, Tensor logits, Tensor targets, Tensor statistics, {_TERMS}) -> Tensor",
    _backward,
    lambda d_losses, logits, *_: logits.new_empty(logits.shape),
)
_rows_op = operator(
    f"cross_entropy(Tensor logits, Tensor targets, {_TERMS}, bool overwrite) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    _CrossEntropy,
)
