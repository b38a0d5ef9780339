"""Output projection and cross entropy as one operation that never holds all logits.

With hidden states h [N, H], output weights W [V, H] and labels y: loss = Σ_n logsumexp(z_n) − z_n[y_n], z = cap(h Wᵀ).
The logits of one 32 k-token sequence over a 128 k vocabulary are 31 GiB in float32. Here a chunk of rows at a time is
projected, reduced to its loss and turned into its own gradient softmax(z) − onehot(y) at once, so what stays is the
gradient of h and of W (as Liger does). Weight gradients accumulate over chunks in float32, as they would in one GEMM.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
LinearCrossEntropyImpl = Literal["chunked", "eager"]
CHUNK_BYTES = 512 * 2**20
"""Float32 logits held at a time; larger chunks gain nothing measurable once a chunk fills the GPU."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    softcap: float | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    impl: LinearCrossEntropyImpl = "chunked",
) -> Tensor:
    """Summed cross entropy (float32 or better) of hidden [..., H] against labels [...]; labels of −100 do not count."""
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if impl == "eager":
        return linear_cross_entropy_eager(hidden, weight, labels, softcap=softcap)
    if not torch.is_grad_enabled():  # the operation itself cannot tell, and would compute gradients nobody wants
        hidden, weight = hidden.detach(), weight.detach()
    rows = max(1, chunk_bytes // (4 * weight.shape[0]))
    return _LinearCrossEntropy.apply(hidden, weight, labels, softcap, rows)


def linear_cross_entropy_eager(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, softcap: float | None = None
) -> Tensor:
    """The reference: all logits at once."""
    return _cross_entropy(hidden @ weight.T, labels, softcap)


def _cross_entropy(logits: Tensor, labels: Tensor, softcap: float | None) -> Tensor:
    return F.cross_entropy(capped(logits.to(_wide(logits)), softcap), labels, ignore_index=IGNORE, reduction="sum")


def _wide(hidden: Tensor) -> torch.dtype:
    """What losses and weight gradients are summed in: float32, or float64 where the model is."""
    return torch.promote_types(hidden.dtype, torch.float32)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """cap · tanh(logits / cap)."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes both gradients during forward and scales them by the incoming gradient in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float | None, rows: int) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        loss = torch.zeros((), device=hidden.device, dtype=_wide(hidden))
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=_wide(hidden)) if needs_weight else None
        for start in range(0, hidden.shape[0], rows):
            span = slice(start, start + rows)
            h, counted = hidden[span], labels[span] != IGNORE
            logits = h @ weight.T
            if not (needs_hidden or needs_weight):
                loss += _cross_entropy(logits, labels[span], softcap)
                continue
            losses, d_logits = _losses_and_gradient(logits, labels[span].clamp(min=0), softcap)
            loss += losses.masked_fill(~counted, 0).sum()
            if d_hidden is not None:  # rows that do not count are masked here, where they are narrow
                torch.mm(d_logits, weight, out=d_hidden[span])
                d_hidden[span] *= counted[:, None]
            if d_weight is not None:
                _accumulate(d_weight, d_logits, h * counted[:, None])
        ctx.save_for_backward(d_hidden, None if d_weight is None else d_weight.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        (d_loss,) = grads
        return (
            None if d_hidden is None else d_hidden * d_loss.to(d_hidden.dtype),
            None if d_weight is None else d_weight * d_loss.to(d_weight.dtype),
            None,
            None,
            None,
        )


def _losses_and_gradient(logits: Tensor, labels: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Per row logsumexp(z) − z[y], and softmax(z) − onehot(y) times the softcap's slope 1 − (z/cap)².

    One softmax serves both: with p its output and j the largest logit, logsumexp(z) = z_j − log p_j, where p_j ≥ 1/V.
    """
    wide = _wide(logits)
    z = logits if softcap is None else capped(logits.to(wide), softcap)
    largest, where = z.max(-1, keepdim=True)
    label = labels[:, None]
    z_label = z.gather(-1, label)
    p = torch.softmax(z, -1, dtype=wide)
    losses = largest.to(wide) - p.gather(-1, where).log() - z_label.to(wide)
    p.scatter_add_(-1, label, torch.full_like(losses, -1.0))
    if softcap is not None:
        p *= 1 - (z / softcap) ** 2
    return losses.squeeze(-1), p.to(logits.dtype)


def _accumulate(d_weight: Tensor, d_logits: Tensor, hidden: Tensor) -> None:
    """d_weight += d_logitsᵀ hidden, summed in the dtype of `d_weight`."""
    if hidden.dtype == d_weight.dtype:
        d_weight.addmm_(d_logits.T, hidden)
    elif hidden.is_cuda:
        torch.addmm(d_weight, d_logits.T, hidden, out_dtype=torch.float32, out=d_weight)
    else:
        d_weight += (d_logits.T.float()) @ hidden.float()
