"""3D matrix products: Y = X · Wᵀ on a q × q × q mesh of ranks, each with a q³-th of X, W and Y (Bian et al. 2021).

Of the three axes one splits rows on both sides (`weights`), one splits X's columns (`outputs`: products are partial
over it) and one W's outputs (`inputs`). A rank completes its blocks of X and W by one all-gather each, and a
reduce-scatter leaves a q³-th of Y, whose rows are split along `outputs` and columns along `inputs`: the two axes have
changed places, and a second product changes them back.

    X [n/q², in/q]  —all-gather over inputs→  [n/q, in/q]
    W [out/q, in/q²] —all-gather over weights→ [out/q, in/q]
    Y = X · Wᵀ [n/q, out/q], partial —reduce-scatter over outputs→ [n/q², out/q]

Elements that a rank sends (an all-gather or reduce-scatter over q ranks sends (q − 1)/q of the larger tensor):

| | X or dX | W or dW | Y or dY |
|---|---|---|---|
| forward | (q − 1) · n · in / q³ | (q − 1) · in · out / q³ | (q − 1) · n · out / q³ |
| backward | 2 (q − 1) · n · in / q³ | 2 (q − 1) · in · out / q³ | (q − 1) · n · out / q³ |

Backward gathers X and W again, as only a rank's own parts are saved, and reduce-scatters their gradients. Several
weights that multiply the same X share its all-gathers and the reduce-scatter of its gradients.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tightfit.collectives.conjugate import ALL_GATHER, REDUCE_SCATTER

Group = dist.ProcessGroup


@dataclass(frozen=True)
class CubicGroups:
    """This rank's group along each axis, named after the tensor that is all-gathered or reduce-scattered over it."""

    inputs: Group
    """Ranks with other rows of X, and other outputs of W."""
    weights: Group
    """Ranks that share a block of W, each with some of its columns, and have other rows of X and Y."""
    outputs: Group
    """Ranks with other columns of X and inputs of W, and other rows of Y."""


def cubic(x: Tensor, weights: tuple[Tensor, ...], groups: CubicGroups) -> tuple[Tensor, ...]:
    """x [..., in/q] times the transpose of each weight [out/q, in/q²], whose other columns `groups.weights` have."""
    outputs = _Cubic.apply(x.flatten(0, -2), groups, *weights)
    return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in outputs)


class _Cubic(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: CubicGroups, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.groups = groups
        ctx.save_for_backward(x, *weights)
        rows, *matrices = _gathered(groups, x, weights)
        return tuple(_scatter(rows @ matrix.t(), groups.outputs) for matrix in matrices)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        groups: CubicGroups = ctx.groups
        rows, *matrices = _gathered(groups, x, tuple(weights))
        dys = [_wait(_gather(dy, groups.outputs)) for dy in gradients]
        dx = dys[0] @ matrices[0]
        for dy, matrix in zip(dys[1:], matrices[1:], strict=True):
            dx.addmm_(dy, matrix)
        dweights = (_scatter_columns(dy.t() @ rows, groups.weights) for dy in dys)
        return _scatter(dx, groups.inputs), None, *dweights


def _gathered(groups: CubicGroups, x: Tensor, weights: tuple[Tensor, ...]) -> list[Tensor]:
    """X and every weight, all-gathered; all these all-gathers are in flight together."""
    coming = [_gather(x, groups.inputs), *(_gather(weight, groups.weights) for weight in weights)]
    rows, *stacks = [_wait(each) for each in coming]
    ranks = groups.weights.size()
    return [rows, *(stack.unflatten(0, (ranks, -1)).movedim(0, 1).flatten(1) for stack in stacks)]


def _gather(own: Tensor, group: Group) -> tuple[Tensor, Any]:
    """All ranks' rows [ranks · n, ...], valid after waiting for the work, which is returned too."""
    whole = own.new_empty(own.shape[0] * group.size(), *own.shape[1:])
    return whole, ALL_GATHER(whole, own.detach().contiguous(), group=group, async_op=True)


def _wait(coming: tuple[Tensor, Any]) -> Tensor:
    tensor, work = coming
    if work is not None:
        work.wait()
    return tensor


def _scatter(parts: Tensor, group: Group) -> Tensor:
    """This rank's rows [n, ...] of the sum over ranks of [ranks · n, ...]."""
    own = parts.new_empty(parts.shape[0] // group.size(), *parts.shape[1:])
    REDUCE_SCATTER(own, parts.contiguous(), group=group)
    return own


def _scatter_columns(parts: Tensor, group: Group) -> Tensor:
    """This rank's columns [n, m] of the sum over ranks of [n, ranks · m]."""
    stacked = parts.unflatten(1, (group.size(), -1)).movedim(1, 0).flatten(0, 1)
    return _scatter(stacked, group)
