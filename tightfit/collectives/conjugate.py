"""Collectives of tensor parallelism as pairs that are each other's gradient: copy ↔ sum, gather ↔ scatter, part ↔ join.

Where a forward pass copies to all ranks, the gradients of the copies are summed; where it gathers pieces, they are
reduced and scattered; and the other way round (Shoeybi et al. 2019; Korthikanti et al. 2022). Pieces are equal numbers
of tokens, in the order of rows and positions laid out one after another: norms and sums do not care where a row ends,
and what is gathered that way is contiguous, so no collective needs a copy beside it.

What was gathered for a projection would be its largest saved tensor. `scattered` lets go of its memory when the block
is done (`Taken`) and gathers it again in backward, a block ahead of need: on GPUs the collective runs while the block
after it computes. While a checkpointed layer is recomputed it stays, as it is needed at once. Groups are one mesh axis.
All ranks of the group must call every function, in the same order.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup
Collective = Callable[[Tensor, Group], Tensor]
ALL_GATHER: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""By their names since torch 2.13, or those before."""


def copied(x: Tensor, group: Group) -> Tensor:
    """x, whose gradients on all ranks are summed."""
    return _Conjugate.apply(x, group, _same, _all_reduce)


def summed(x: Tensor, group: Group) -> Tensor:
    """Σ of all ranks' x; its gradient is everybody's."""
    return _Conjugate.apply(x, group, _all_reduce, _same)


def gathered(x: Tensor, group: Group) -> Tensor:
    """All ranks' tokens [1, ranks · n, H] of x [1, n, H]; gradients are summed and scattered."""
    return _Conjugate.apply(x, group, _all_gather, _reduce_scatter)


class Taken:
    """What a block took in: `whole`, gathered from `piece`, whose memory is given back until backward.

    It is not kept alive here: autograd does that, unless the layer is to be recomputed.
    """

    def __init__(self, piece: Tensor, whole: Tensor, before: "Taken | None" = None) -> None:
        self._tensors = weakref.ref(piece), weakref.ref(whole)
        self.before = before
        """Of the block before, whose backward comes next."""
        self._work: Any = None

    def begin(self, group: Group) -> None:
        """Start to gather again, if that is needed."""
        piece, whole = (found() for found in self._tensors)
        if piece is not None and whole is not None and self._work is None:
            self._work = _gather_again(group, piece, whole)

    def finish(self, group: Group, piece: Tensor, whole: Tensor) -> None:
        """Have all of it back, and the block before on its way."""
        work = self._work or _gather_again(group, piece, whole)
        if work is not None:
            with torch.autograd._unsafe_preserve_version_counter(whole):  # type: ignore[attr-defined]
                work.wait()
        if self.before is not None:
            self.before.begin(group)
        self.before = self._work = None


def scattered(x: Tensor, group: Group, piece: Tensor | None = None, whole: Tensor | None = None,
              taken: Taken | None = None) -> Tensor:  # fmt: skip
    """This rank's tokens [1, n, H] of Σ x [..., H]; gradients are gathered.

    `whole`, gathered from `piece`, is let go of until then, as `taken` says.
    """
    return _Scattered.apply(x, group, piece, whole, taken)


def own_part(x: Tensor, group: Group) -> Tensor:
    """This rank's tokens [1, n, H] of an x [..., H] that all ranks have; gradients are gathered."""
    return _Conjugate.apply(x, group, _own_tokens, _all_gather)


def joined_columns(x: Tensor, group: Group) -> Tensor:
    """All ranks' columns [..., ranks · n] of x [..., n]; gradients are summed and scattered."""
    return _Conjugate.apply(x, group, _join_columns, _split_columns)


def gradient_shared(x: Tensor, group: Group) -> Tensor:
    """x, computed by all ranks alike from what will have its gradients summed: each rank's is a share of it."""
    return _Conjugate.apply(x, group, _same, lambda dy, group: dy / group.size())


def _same(x: Tensor, group: Group) -> Tensor:
    return x.view_as(x)


def _all_gather(x: Tensor, group: Group) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = rows.new_empty(rows.shape[0] * group.size(), rows.shape[1])
    ALL_GATHER(out, rows, group=group)
    return out[None]


def _reduce_scatter(x: Tensor, group: Group) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = rows.new_empty(rows.shape[0] // group.size(), rows.shape[1])
    REDUCE_SCATTER(out, rows, group=group)
    return out[None]


def _all_reduce(x: Tensor, group: Group) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _own_tokens(x: Tensor, group: Group) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0] // group.size()
    return rows[group.rank() * count :][:count].clone()[None]


def _join_columns(x: Tensor, group: Group) -> Tensor:
    parts = _all_gather(x, group).view(group.size(), *x.shape)
    return parts.movedim(0, -2).flatten(-2)


def _split_columns(x: Tensor, group: Group) -> Tensor:
    return _reduce_scatter(x.unflatten(-1, (group.size(), -1)).movedim(-2, 0), group)


def recomputing() -> bool:
    """Whether this forward pass runs inside a backward one."""
    return torch._C._current_graph_task_id() >= 0


class _Conjugate(torch.autograd.Function):
    """One collective forward, its conjugate backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, there: Collective, back: Collective) -> Tensor:
        ctx.group, ctx.shape, ctx.back = group, x.shape, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(dy, ctx.group).view(ctx.shape), None, None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, piece: Tensor | None, whole: Tensor | None, taken: Taken | None
    ) -> Tensor:
        ctx.group, ctx.shape, ctx.taken = group, x.shape, taken
        if piece is not None and whole is not None and ctx.needs_input_grad[0]:
            ctx.save_for_backward(piece, whole)
            if not recomputing():
                whole.untyped_storage().resize_(0)
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        held: tuple[Tensor, ...] = ctx.saved_tensors  # asked for once: checkpointing computes them again
        gradient = _all_gather(dy, ctx.group).view(ctx.shape)
        if held:
            ctx.taken.finish(ctx.group, *held)
        return gradient, None, None, None, None


def _gather_again(group: Group, piece: Tensor, whole: Tensor) -> Any:
    """Into the very memory that operations of forward have saved; autograd must not take that for a change."""
    storage = whole.untyped_storage()
    if storage.size():
        return None
    storage.resize_(whole.numel() * whole.element_size())
    rows = piece.reshape(-1, piece.shape[-1]).contiguous()
    later = whole.is_cuda  # gloo counts a change of its output whenever it is done
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(whole):  # type: ignore[attr-defined]
        return ALL_GATHER(whole.view(-1, whole.shape[-1]), rows, group=group, async_op=later)
