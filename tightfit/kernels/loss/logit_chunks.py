"""The loop over chunks of logits: project some rows, compute their loss and gradient, multiply out, reuse the buffer.

One buffer holds the logits z = h Wᵀ + b of a chunk. `read_rows` overwrites them with ∂L/∂z, then two GEMMs compute
∂L/∂h = ∂L/∂z W for the chunk's rows and ∂L/∂W += ∂L/∂zᵀ h. That sum over chunks is float32, as it is inside one GEMM;
partial sums in bf16, as in other implementations, double the gradient's rounding error at eight chunks. Each addition
reads and writes V · H floats, so few, large chunks are fast. They cost little memory: the float32 sum is cast to the
weight's dtype only in backward, so the V · H values of that gradient do not exist yet, and H rows of logits may take
their memory, beside the bytes that a caller allows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tightfit.kernels.loss.logit_rows import Combine, LossTerms, RowLabels, read_rows
from tightfit.kernels.operators import multiprocessors
from tightfit.levers.policy.loss_chunks import padded

TILE_SIDE = 128
"""Least rows and columns of a GEMM's output tile."""


@dataclass(frozen=True)
class Wanted:
    """Which gradients are to be computed."""

    hidden: bool
    weight: bool
    bias: bool

    @property
    def any(self) -> bool:
        """Whether any gradient is wanted."""
        return self.hidden or self.weight or self.bias


@dataclass
class Gradients:
    """∂L/∂h in its dtype, ∂L/∂W and ∂L/∂bias as float32 sums (float64 in float64); None where not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def spans(total: int, rows: int) -> Iterator[slice]:
    """Consecutive chunks of at most `rows` of `total` rows."""
    return (slice(start, min(start + rows, total)) for start in range(0, total, rows))


def read_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: RowLabels,
    terms: LossTerms,
    wanted: Wanted,
    *,
    rows: int,
    combine: Combine | None = None,
    triton: bool = False,
) -> tuple[Tensor, Gradients]:
    """Statistics [4, N] of the logits of hidden [N, H] and weight [V, H], and wanted gradients, by chunks of `rows`."""
    N, V = hidden.shape[0], weight.shape[0]
    weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    buffer = hidden.new_empty(min(rows, N), padded(V))
    buffer[:, V:] = 0
    statistics = torch.empty(4, N, device=hidden.device, dtype=wide)
    gradients = Gradients(torch.empty_like(hidden) if wanted.hidden else None, None, None)
    for span in spans(N, rows):
        h, logits = hidden[span], buffer[: span.stop - span.start, :V]
        if bias is None:
            torch.mm(h, weight.T, out=logits)
        else:
            torch.addmm(bias, h, weight.T, out=logits)
        statistics[:, span] = read_rows(
            logits, labels.of(span), terms, with_gradient=wanted.any, combine=combine, triton=triton
        )
        if gradients.hidden is not None:
            write_product(gradients.hidden[span], logits, weight, wide)
        if wanted.weight:
            gradients.weight = add_product(gradients.weight, logits, h, wide)
        if wanted.bias:
            gradients.bias = _add(gradients.bias, logits.sum(0, dtype=wide))
    if N == 0:
        gradients.weight = torch.zeros_like(weight, dtype=wide) if wanted.weight else None
        gradients.bias = weight.new_zeros(V, dtype=wide) if wanted.bias else None
    return statistics, gradients


def write_product(out: Tensor, d_logits: Tensor, weight: Tensor, wide: torch.dtype) -> None:
    """out = d_logits · weight.

    For outputs with fewer tiles than multiprocessors cuBLAS splits the sum over the vocabulary (split-K) and adds the
    parts in bf16, which makes the error 40 % larger; those are computed in `wide`.
    """
    tiles = -(-out.shape[0] // TILE_SIDE) * -(-out.shape[1] // TILE_SIDE)
    if out.is_cuda and out.dtype != wide and tiles < multiprocessors(out.device):
        out.copy_(torch.mm(d_logits, weight, out_dtype=wide))
    else:
        torch.mm(d_logits, weight, out=out)


def _add(total: Tensor | None, new: Tensor) -> Tensor:
    return new if total is None else total.add_(new)


def add_product(total: Tensor | None, d_logits: Tensor, hidden: Tensor, wide: torch.dtype) -> Tensor:
    """total + d_logitsᵀ hidden, accumulated in `wide`; the first product becomes the total."""
    left = d_logits.T
    if hidden.dtype == wide:
        return left @ hidden if total is None else total.addmm_(left, hidden)
    if not hidden.is_cuda:
        return _add(total, left.to(wide) @ hidden.to(wide))
    if total is None:
        return torch.mm(left, hidden, out_dtype=wide)
    return torch.addmm(total, left, hidden, out_dtype=wide, out=total)
