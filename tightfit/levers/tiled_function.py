"""A token-wise function computed tile by tile along the sequence, saving its inputs only.

For functions with f(x)[:, a:b] = f(x[:, a:b]): projections, norms, MLPs. Forward runs tile after tile and saves
nothing. Backward recomputes each tile, takes its gradients and frees it, so intermediates take the memory of one tile
at any sequence length. (Arctic Long Sequence Training, Bekman et al. 2025, tiles MLPs and the loss in this way.)

Weight gradients are summed over tiles in float32 and cast once at the end, as a bf16 sum would round with every tile.
That takes four bytes a weight of the function during its backward.

A separate autograd node saves the inputs before the function runs. Checkpointing stops recomputing a layer as soon as
all saved tensors exist again, so of a tiled function at the end of a layer it recomputes only the inputs; the tiles are
then recomputed once, in backward. Limits: no second derivatives; no random numbers inside.
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
"""(slice of the sequence, inputs [B, t, ...] of that slice) → outputs [B, t, ...]."""


@dataclass
class _TiledCall:
    """The function, and the modules whose weights it uses."""

    function: TileFunction
    tile_count: int
    modules: Sequence[nn.Module]
    result_matters: bool
    """Whether gradients depend on the result of the function's last operation."""
    saving_node: Any = None
    """The autograd node that saved the inputs."""

    def weights(self) -> list[Tensor]:
        """Trained weights of the modules; looked up again in backward, where gathered weights may be other tensors."""
        return [p for module in self.modules for p in module.parameters() if p.requires_grad]


def in_tiles(
    function: TileFunction,
    inputs: Sequence[Tensor],
    modules: Sequence[nn.Module],
    tiles: int,
    *,
    result_matters: bool = True,
) -> tuple[Tensor, ...]:
    """Apply `function`, which uses weights of `modules`, to inputs [B, T, ...] in `tiles` tiles of T.

    Without `result_matters`, recomputation in backward may skip the function's last operation.
    """
    call = _TiledCall(function, tiles, modules, result_matters)
    weights = call.weights()
    needs_grad = any(tensor.requires_grad for tensor in (*inputs, *weights))
    if not (torch.is_grad_enabled() and needs_grad):
        return _run_tiles(call, inputs)
    first, *others = inputs
    if not first.requires_grad:
        first = first.detach().requires_grad_()  # so that _SaveInputs becomes a node of the graph
    first = _SaveInputs.apply(first, *others)
    call.saving_node = first.grad_fn
    return _InTiles.apply(call, first, *others, *weights)


def tile_slices(length: int, tiles: int) -> Iterator[slice]:
    """At most `tiles` equal slices of `length`; the last may be shorter."""
    size = max(1, -(-length // tiles))
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _run_tiles(call: _TiledCall, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run all tiles, and copy their outputs into whole tensors [B, T, ...]."""
    length = inputs[0].shape[1]
    outputs: tuple[Tensor, ...] = ()
    for tile in tile_slices(length, call.tile_count):
        results = call.function(tile, *(x[:, tile] for x in inputs))
        outputs = outputs or tuple(y.new_empty(y.shape[0], length, *y.shape[2:]) for y in results)
        for whole, y in zip(outputs, results, strict=True):
            whole[:, tile].copy_(y)
    return outputs


class _SaveInputs(torch.autograd.Function):
    """Saves all its inputs for backward and returns the first."""

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
    def forward(ctx: Any, call: _TiledCall, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return _run_tiles(call, inputs[: len(inputs) - len(call.weights())])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        call: _TiledCall = ctx.call
        inputs = call.saving_node.saved_tensors
        weights, needed = call.weights(), ctx.needs_input_grad[1 : len(inputs) + 1]
        d_inputs = [torch.empty_like(x) if need else None for x, need in zip(inputs, needed, strict=True)]
        d_weights: list[Tensor | None] = [None] * len(weights)
        for tile in tile_slices(inputs[0].shape[1], call.tile_count):
            leaves = [x[:, tile].detach().requires_grad_(need) for x, need in zip(inputs, needed, strict=True)]
            found = _tile_gradients(call, tile, leaves, weights, [g[:, tile] for g in gradients])
            _write(d_inputs, tile, found)
            d_weights = [_accumulate(total, g) for total, g in zip(d_weights, found[len(leaves) :], strict=True)]
            del found  # before the next tile allocates its own
        return None, *d_inputs, *_cast_like(d_weights, weights)


def _write(d_inputs: list[Tensor | None], tile: slice, gradients: list[Tensor | None]) -> None:
    """Copy the gradients of a tile's inputs into `d_inputs`; zero where there is none."""
    for whole, gradient in zip(d_inputs, gradients, strict=False):
        if whole is not None:
            whole[:, tile].copy_(gradient) if gradient is not None else whole[:, tile].zero_()


def _tile_gradients(
    call: _TiledCall, tile: slice, leaves: list[Tensor], weights: list[Tensor], gradients: list[Tensor]
) -> list[Tensor | None]:
    """Gradients of a tile's inputs (None where not required), then of the weights."""
    needed = [x for x in leaves if x.requires_grad]
    with torch.enable_grad():
        with nullcontext() if call.result_matters else result_unwanted():
            outputs = call.function(tile, *leaves)
        found = iter(torch.autograd.grad(outputs, [*needed, *weights], gradients, allow_unused=True))
    return [next(found) if x.requires_grad else None for x in (*leaves, *weights)]


def _accumulate(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """`total` + `gradient`, in float32 or wider."""
    if gradient is None:
        return total
    if total is None:
        return gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return total.add_(gradient)


def _cast_like(sums: list[Tensor | None], weights: list[Tensor]) -> Iterator[Tensor | None]:
    """Each sum in its weight's dtype; the float32 ones are freed one by one."""
    for index, weight in enumerate(weights):
        total, sums[index] = sums[index], None
        yield None if total is None else total.to(weight.dtype)
