"""Collectives of tensor and context parallelism as autograd functions: each one's backward is the conjugate collective.

| function | forward | backward |
|---|---|---|
| `copy_to_ranks` | identity | all-reduce |
| `all_reduce` | all-reduce | identity |
| `all_gather` | all-gather of tokens | reduce-scatter |
| `reduce_scatter` | reduce-scatter of tokens | all-gather |
| `split_tokens` | this rank's tokens | all-gather |
| `all_gather_columns` | all-gather of columns | reduce-scatter |
| `all_to_all` | piece i to rank i | the same |

(Shoeybi et al. 2019; Korthikanti et al. 2022.) Tokens are split evenly over the flattened [rows · length] dimension:
norms and sums do not care where a row ends, and the gathered tensor is contiguous, so no collective needs a copy.

The all-gathered input of a block (attention or MLP) would be its largest saved tensor. `reduce_scatter`, at the end of
the block, frees its memory (`FreedInput`) and gathers it again in backward, one block ahead of need, so that on GPUs
the collective overlaps with the block after it. While a checkpointed layer is recomputed it stays, as it is needed at
once. A group has the ranks of one mesh axis. All of them must call every function, in the same order.
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
"""Torch's functions, under their names since torch 2.13 or the older ones."""


def copy_to_ranks(x: Tensor, group: Group) -> Tensor:
    """x, which all ranks have; gradients are all-reduced."""
    return _Conjugate.apply(x, group, _same, _all_reduce)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Σ x over ranks; every rank has the gradient already."""
    return _Conjugate.apply(x, group, _all_reduce, _same)


def all_gather(x: Tensor, group: Group) -> Tensor:
    """All ranks' tokens [1, ranks · n, H] from x [1, n, H]; gradients are reduce-scattered."""
    return _Conjugate.apply(x, group, _all_gather, _reduce_scatter)


class FreedInput:
    """The all-gathered input of a block, `gathered` from `shard`; its memory is freed from forward to backward.

    The tensors are referenced weakly: autograd keeps them alive, unless the layer is to be recomputed.
    """

    def __init__(self, shard: Tensor, gathered: Tensor, previous: "FreedInput | None" = None) -> None:
        self._tensors = weakref.ref(shard), weakref.ref(gathered)
        self.previous = previous
        """The freed input of the block before, whose backward comes next."""
        self._work: Any = None

    def prefetch(self, group: Group) -> None:
        """Start to all-gather again, unless that has started, the memory was not freed or nothing needs it any more."""
        shard, gathered = (reference() for reference in self._tensors)
        if shard is not None and gathered is not None and self._work is None:
            self._work = _gather_again(group, shard, gathered)

    def restore(self, group: Group, shard: Tensor, gathered: Tensor) -> None:
        """Wait for the gathered input, and start to prefetch that of the block before."""
        work = self._work or _gather_again(group, shard, gathered)
        if work is not None:
            with torch.autograd._unsafe_preserve_version_counter(gathered):  # type: ignore[attr-defined]
                work.wait()
        if self.previous is not None:
            self.previous.prefetch(group)
        self.previous = self._work = None


def reduce_scatter(
    x: Tensor,
    group: Group,
    shard: Tensor | None = None,
    gathered: Tensor | None = None,
    freed: FreedInput | None = None,
) -> Tensor:
    """This rank's tokens [1, n, H] of Σ x [..., H]; gradients are all-gathered.

    Where given, the memory of `gathered` (all-gathered from `shard`) is freed until backward, which `freed` restores.
    """
    return _ReduceScatter.apply(x, group, shard, gathered, freed)


def split_tokens(x: Tensor, group: Group) -> Tensor:
    """This rank's tokens [1, n, H] of an x [..., H] that all ranks have; gradients are all-gathered."""
    return _Conjugate.apply(x, group, _own_tokens, _all_gather)


def all_gather_columns(x: Tensor, group: Group) -> Tensor:
    """All ranks' columns [..., ranks · n] from x [..., n]; gradients are reduce-scattered."""
    return _Conjugate.apply(x, group, _join_columns, _split_columns)


def all_to_all(x: Tensor, group: Group) -> Tensor:
    """Piece i of x [ranks, ...] goes to rank i, whose piece takes its place; gradients go back the same way."""
    return _Conjugate.apply(x, group, _all_to_all, _all_to_all)


def divide_gradient(x: Tensor, group: Group) -> Tensor:
    """x, computed alike on all ranks; its gradient is divided by their number, as a later sum adds them up.

    A copy of the few numbers: what a layer returns under FSDP2 may be no view.
    """
    return _Conjugate.apply(x, group, lambda x, group: x.clone(), lambda dy, group: dy / group.size())


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


def _all_to_all(x: Tensor, group: Group) -> Tensor:
    pieces = x.contiguous()
    out = torch.empty_like(pieces)
    dist.all_to_all_single(out, pieces, group=group)
    return out


def is_recomputing() -> bool:
    """Whether this forward runs inside a backward pass."""
    return torch._C._current_graph_task_id() >= 0


class _Conjugate(torch.autograd.Function):
    """One collective in forward, its conjugate in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, collective: Collective, conjugate: Collective) -> Tensor:
        ctx.group, ctx.shape, ctx.conjugate = group, x.shape, conjugate
        return collective(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.conjugate(dy, ctx.group).view(ctx.shape), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, shard: Tensor | None, gathered: Tensor | None, freed: FreedInput | None
    ) -> Tensor:
        ctx.group, ctx.shape, ctx.freed = group, x.shape, freed
        if shard is not None and gathered is not None and ctx.needs_input_grad[0]:
            ctx.save_for_backward(shard, gathered)
            if not is_recomputing():
                gathered.untyped_storage().resize_(0)
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved: tuple[Tensor, ...] = ctx.saved_tensors  # read once: under checkpointing this recomputes the layer
        gradient = _all_gather(dy, ctx.group).view(ctx.shape)
        if saved:
            ctx.freed.restore(ctx.group, *saved)
        return gradient, None, None, None, None


def _gather_again(group: Group, shard: Tensor, gathered: Tensor) -> Any:
    """All-gather into the storage that forward's operations saved, without raising its version for autograd."""
    storage = gathered.untyped_storage()
    if storage.size():
        return None
    storage.resize_(gathered.numel() * gathered.element_size())
    rows = shard.reshape(-1, shard.shape[-1]).contiguous()
    asynchronous = gathered.is_cuda  # gloo raises the version when it is done, which would be too late to undo
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(gathered):  # type: ignore[attr-defined]
        return ALL_GATHER(gathered.view(-1, gathered.shape[-1]), rows, group=group, async_op=asynchronous)
