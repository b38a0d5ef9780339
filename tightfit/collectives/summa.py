"""SUMMA: Y = X · Wᵀ on a q × q mesh of ranks, where X, W and Y are all cut in q × q blocks.

Rank (i, j) has X_ij (rows i, columns j of X), W_ji (outputs j, inputs i) and makes Y_ij. In step l the ranks of row i
are sent X_il, those of column j are sent W_jl, and every rank adds their product to its block of Y:

    Y_ij = Σ_l X_il · W_jlᵀ        dX_il = Σ_j dY_ij · W_jl        dW_jl = Σ_i dY_ijᵀ · X_il

Backward is conjugate: what was sent to a row or column is summed over it, onto the rank that had it. It sends the
blocks of X and W once more, as only a rank's own are saved. Elements in the collectives of one rank, for X [n, in]:

| | broadcast | reduced |
|---|---|---|
| forward | (n · in + in · out) / q | – |
| backward | (n · in + in · out) / q | (n · in + in · out) / q |

(van de Geijn and Watts 1997; Xu and You 2021, "Optimus", whose time has a factor log₂ q for the depth of a broadcast
tree.) Several weights that multiply the same X (q, k and v; gate and up) share its broadcasts and the sum of its
gradients. The blocks of step l + 1 are on their way while those of step l are multiplied: two of each exist at a time.
2.5D meshes (Wang et al. 2022, "Tesseract") have d such meshes, each with other rows of X and a copy of W.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup


@dataclass(frozen=True)
class SummaGroups:
    """The groups in which rank (i, j) exchanges blocks."""

    inputs: Group
    """Ranks (i, ·), with the same rows and other columns of X."""
    weights: Group
    """Ranks (·, j), with the same outputs and other inputs of W."""


def summa(x: Tensor, weights: tuple[Tensor, ...], groups: SummaGroups) -> tuple[Tensor, ...]:
    """x [..., in/q] times the transpose of each weight [out/q, in/q]."""
    outputs = _Summa.apply(x.flatten(0, -2), groups, *weights)
    return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in outputs)


class _Summa(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: SummaGroups, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.groups = groups
        ctx.save_for_backward(x, *weights)
        outputs = [x.new_zeros(x.shape[0], weight.shape[0]) for weight in weights]
        for block, *parts in _blocks(groups, x, weights):
            for output, part in zip(outputs, parts, strict=True):
                output.addmm_(block, part.t())
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        groups: SummaGroups = ctx.groups
        dys = [dy.contiguous() for dy in gradients]
        dx, *dweights = [_Sums(group) for group in (groups.inputs, *[groups.weights] * len(weights))]
        for block, *parts in _blocks(groups, x, tuple(weights)):
            own = dys[0] @ parts[0]
            for dy, part in zip(dys[1:], parts[1:], strict=True):
                own.addmm_(dy, part)
            dx.add(own)
            for dy, sums in zip(dys, dweights, strict=True):
                sums.add(dy.t() @ block)
        return dx.own(), None, *(sums.own() for sums in dweights)


class _Sums:
    """Reductions over a group, the l-th of them onto rank l; at most one is in flight."""

    def __init__(self, group: Group) -> None:
        self.group, self.count, self.work = group, 0, None
        self.kept: Tensor | None = None

    def add(self, part: Tensor) -> None:
        """Start to reduce this rank's `part` onto the next rank of the group in turn."""
        self._wait()
        self.work = dist.reduce(part, group_dst=self.count, group=self.group, async_op=True)
        if self.count == self.group.rank():
            self.kept = part
        self.count += 1

    def own(self) -> Tensor:
        """The sum that this rank keeps."""
        self._wait()
        assert self.kept is not None
        return self.kept

    def _wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.work = None


def _blocks(groups: SummaGroups, x: Tensor, weights: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """Step by step: the block of X of a rank with the same rows, and the weights of one with the same outputs."""
    senders = [_broadcasts(x, groups.inputs), *(_broadcasts(weight, groups.weights) for weight in weights)]
    return zip(*senders, strict=True)


def _broadcasts(own: Tensor, group: Group) -> Iterator[Tensor]:
    """Every rank's block in turn; the next one is on its way while one is used."""
    coming = _broadcast(own, 0, group)
    for source in range(1, group.size() + 1):
        block, work = coming
        if source < group.size():
            coming = _broadcast(own, source, group)
        if work is not None:
            work.wait()
        yield block


def _broadcast(own: Tensor, source: int, group: Group) -> tuple[Tensor, Any]:
    is_own = group.rank() == source
    block = own.detach().contiguous() if is_own else torch.empty_like(own, memory_format=torch.contiguous_format)
    return block, dist.broadcast(block, group_src=source, group=group, async_op=True)
