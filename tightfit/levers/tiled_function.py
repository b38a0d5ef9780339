"""A function of a sequence computed tile after tile, keeping its inputs alone.

For functions that treat every token by itself, f(x)[:, a:b] = f(x[:, a:b]): projections, norms, MLPs. Forward runs the
tiles one after another and keeps nothing of them. Backward runs each tile again with gradients, takes these, and lets
go of the tile: what such a function holds inside is a tile's, however long the sequence. (Arctic Long Sequence
Training, Bekman et al. 2025, tiles MLPs and the loss in this way.)

Weights' gradients are summed over tiles in float32 and narrowed once at the end: a bf16 sum would lose more with every
tile. That is four bytes a weight of the function while its backward runs.

Inputs are saved before the function runs, by a node of their own. Where activation checkpointing recomputes a layer, it
stops as soon as everything that was saved is there again: a tiled function at the end of a layer is then not computed a
second time only to be computed a third time, tile by tile. Limits: no second derivatives; no random numbers inside.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tightfit.kernels.recomputation import result_unwanted

TileFunction = Callable[..., tuple[Tensor, ...]]
"""Outputs [B, t, ...] of a slice of the sequence and the inputs' [B, t, ...] there."""


@dataclass
class _Work:
    """What is done to each tile, with the weights of `modules`."""

    function: TileFunction
    tiles: int
    modules: Sequence[nn.Module]
    result_matters: bool
    """Whether gradients depend on what the function's last operation returns."""
    kept: Any = None
    """The node that saved the inputs."""

    def weights(self) -> list[Tensor]:
        """Asked for anew in backward: what is gathered from ranks or streamed in may be another tensor by then."""
        return [p for module in self.modules for p in module.parameters() if p.requires_grad]


def in_tiles(
    function: TileFunction, inputs: Sequence[Tensor], modules: Sequence[nn.Module], tiles: int,
    *, result_matters: bool = True,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`function` of inputs [B, T, ...], `tiles` pieces of T (the last may be shorter); it may use `modules` only.

    Without `result_matters` its last operation may leave its result undone where only gradients are wanted.
    """
    work = _Work(function, tiles, modules, result_matters)
    weights = work.weights()
    wanted = any(tensor.requires_grad for tensor in (*inputs, *weights))
    if not (torch.is_grad_enabled() and wanted):
        return _joined(work, inputs)
    first, *others = inputs
    if not first.requires_grad:
        first = first.detach().requires_grad_()  # else nobody would save it
    first = _Kept.apply(first, *others)
    work.kept = first.grad_fn
    return _InTiles.apply(work, first, *others, *weights)


def tile_slices(length: int, tiles: int) -> Iterator[slice]:
    """At most `tiles` equal pieces of `length`, the last possibly shorter."""
    size = max(1, -(-length // tiles))
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _joined(work: _Work, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs of all tiles, each written into its place."""
    length = inputs[0].shape[1]
    outputs: tuple[Tensor, ...] = ()
    for part in tile_slices(length, work.tiles):
        made = work.function(part, *(x[:, part] for x in inputs))
        outputs = outputs or tuple(y.new_empty(y.shape[0], length, *y.shape[2:]) for y in made)
        for whole, y in zip(outputs, made, strict=True):
            whole[:, part].copy_(y)
    return outputs


class _Kept(torch.autograd.Function):
    """Saves all it is given, and hands the first on."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return inputs[0].view_as(inputs[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, *(None for _ in ctx.needs_input_grad[1:])


class _InTiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _Work, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.work = work
        return _joined(work, inputs[: len(inputs) - len(work.weights())])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        work: _Work = ctx.work
        inputs = work.kept.saved_tensors
        weights, needed = work.weights(), ctx.needs_input_grad[1 : len(inputs) + 1]
        made = [torch.empty_like(x) if need else None for x, need in zip(inputs, needed, strict=True)]
        sums: list[Tensor | None] = [None] * len(weights)
        for part in tile_slices(inputs[0].shape[1], work.tiles):
            leaves = [x[:, part].detach().requires_grad_(need) for x, need in zip(inputs, needed, strict=True)]
            found = _tile_gradients(work, part, leaves, weights, [g[:, part] for g in gradients])
            _write(made, part, found)
            sums = [_added(total, gradient) for total, gradient in zip(sums, found[len(leaves) :], strict=True)]
            del found  # before the next tile's are made
        return None, *made, *_narrowed(sums, weights)


def _write(made: list[Tensor | None], part: slice, found: list[Tensor | None]) -> None:
    """The gradients of a tile's inputs into their places."""
    for whole, gradient in zip(made, found, strict=False):
        if whole is not None:
            whole[:, part].copy_(gradient) if gradient is not None else whole[:, part].zero_()


def _tile_gradients(
    work: _Work, part: slice, leaves: list[Tensor], weights: list[Tensor], gradients: list[Tensor]
) -> list[Tensor | None]:
    """The gradients of a tile's inputs (None where none is wanted) and of the weights from it."""
    wanted = [x for x in leaves if x.requires_grad]
    with torch.enable_grad():
        with nullcontext() if work.result_matters else result_unwanted():
            made = work.function(part, *leaves)
        found = iter(torch.autograd.grad(made, [*wanted, *weights], gradients, allow_unused=True))
    return [next(found) if x.requires_grad else None for x in (*leaves, *weights)]


def _added(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """The sum over tiles, in float32 or better."""
    if gradient is None:
        return total
    if total is None:
        return gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return total.add_(gradient)


def _narrowed(sums: list[Tensor | None], weights: list[Tensor]) -> Iterator[Tensor | None]:
    """Each as its weight is; the wide ones are let go of one by one."""
    for index, weight in enumerate(weights):
        total, sums[index] = sums[index], None
        yield None if total is None else total.to(weight.dtype)
