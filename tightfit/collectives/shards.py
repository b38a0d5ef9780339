"""Tensors of which every rank holds a part: reading, filling and gathering them.

FSDP2 makes each parameter a DTensor split along its first dimension, as `torch.chunk` would: ranks hold equal numbers
of rows except the last ones, which may hold fewer or none. Tensor ranks hold a `Split` of a parameter, a plain tensor
that is smaller than the model's spec says, so that DDP, FSDP2 and fused kernels see nothing unusual; `as_dtensor` says
as a DTensor what it is a part of, with FSDP2's rows of it where there are some. Everything here takes plain tensors
too, treating them as whole, so callers need not ask. Filling needs no communication: each rank has the whole value and
keeps its own part.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

REGISTRY = "splits"
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
"""It warns that gathering over two axes takes two collectives, which is how it is."""


@dataclass(frozen=True)
class Split:
    """How the ranks of a mesh axis hold one parameter."""

    mesh: DeviceMesh
    """The axis."""
    grid: DeviceMesh
    """The axes along which FSDP2 shards what is left, and this one."""
    dim: int | None
    """The dimension that is cut; None where every rank has all of it."""
    size: int = 0
    """Of that dimension, before it was cut."""
    summed: bool = False
    """Whether each rank's gradient is only a part of a sum."""

    def bounds(self) -> tuple[int, int]:
        """Where the part of this rank begins and how long it is."""
        return _chunk(self.size, self.mesh.size(), self.mesh.get_local_rank())


def _chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """First element and length of part `index`, as torch.chunk has it."""
    each = -(-size // parts)
    first = min(index * each, size)
    return first, min(each, size - first)


def splits_of(model: nn.Module) -> Mapping[str, Split]:
    """How each parameter of a model that tensor ranks share is split, by name; empty for other models."""
    found: Mapping[str, Split] = vars(model).get(REGISTRY, {})
    return found


def remember_splits(model: nn.Module, splits: Mapping[str, Split]) -> None:
    """Keep `splits` with the model, whose state dict describes whole tensors from now on."""
    vars(model)[REGISTRY] = dict(splits)

    def describe(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        for name, split in splits.items():
            if prefix + name in state:
                state[prefix + name] = as_dtensor(state[prefix + name], split)

    model.register_state_dict_post_hook(describe)


def is_shard(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether other ranks hold the rest of `tensor`."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of `tensor` that is here, sharing its memory; all of a plain tensor."""
    with torch.no_grad():
        return tensor.to_local() if is_shard(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of `tensor`. For a shard every rank must call this, and every rank gets it."""
    with torch.no_grad():
        return tensor.full_tensor() if is_shard(tensor) else tensor


def as_dtensor(tensor: Tensor, split: Split | None) -> Tensor:
    """A parameter, its gradient or a state of it as the DTensor it is a part of; as it is where it is not cut."""
    if split is None or split.dim is None or tensor.ndim <= split.dim:
        return tensor
    from torch.distributed.tensor import DTensor, Shard

    mesh, placements = split.mesh, [Shard(split.dim)]
    if is_shard(tensor):
        mesh, placements = split.grid, [*_strided(tensor.placements, split), *placements]
    shape = list(tensor.shape)
    own = split.bounds()[1]
    shape[split.dim] = split.size if shape[split.dim] == own else shape[split.dim] * split.mesh.size()
    size = torch.Size(shape)
    return DTensor.from_local(
        local(tensor).detach(), mesh, placements, run_check=False, shape=size, stride=_contiguous(size)
    )


def _strided(placements: Any, split: Split) -> list[Any]:
    """FSDP2's placements where the rows it has split are themselves a part of the rows."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    cut = split.dim == 0
    return [_StridedShard(0, split_factor=split.mesh.size()) if cut and p == Shard(0) else p for p in placements]


def pieces(tensor: Tensor, split: Split | None) -> int:
    """In how many pieces a parameter is cut: each is on as many ranks of the mesh as there are, divided by this."""
    found = 1 if split is None or split.dim is None else split.mesh.size()
    if is_shard(tensor):
        mesh = tensor.device_mesh
        found *= math.prod(mesh.size(axis) for axis, p in enumerate(tensor.placements) if p.is_shard())
    return found


def like_shard(part: Tensor, shard: "DTensor") -> "DTensor":
    """A tensor split as `shard` is, of which this rank holds `part`: as many rows, whatever each of them holds."""
    from torch.distributed.tensor import DTensor

    shape = torch.Size((shard.shape[0], *part.shape[1:]))
    return DTensor.from_local(
        part, shard.device_mesh, shard.placements, run_check=False, shape=shape, stride=_contiguous(shape)
    )


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    """Strides of a tensor laid out row after row."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides)


def first_element(tensor: Tensor) -> int:
    """The number, in the whole tensor, of the first element that is here."""
    if not is_shard(tensor):
        return 0
    firsts = (first for first, _ in _bounds(tensor))
    return sum(first * stride for first, stride in zip(firsts, _contiguous(tensor.shape), strict=True))


def place(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """First element and length, along every dimension, of the part that is here."""
    return tuple(_bounds(tensor)) if is_shard(tensor) else tuple((0, size) for size in tensor.shape)


@torch.no_grad()
def copy_whole(target: Tensor, values: Tensor, index: int | None = None) -> None:
    """Copy `values` into `target`, or into `target[index]`; of a shard, the part that is here."""
    if not is_shard(target):
        (target if index is None else target[index]).copy_(values)
        return
    here, bounds = local(target), _bounds(target)
    parts = tuple(slice(first, first + count) for first, count in bounds)
    if index is None:
        here.copy_(values[parts])
    elif parts[0].start <= index < parts[0].stop:
        here[index - parts[0].start].copy_(values[parts[1:]])


def _bounds(shard: "DTensor") -> list[tuple[int, int]]:
    """First element and length, along every dimension, of the part that is here: inner axes cut before outer ones."""
    firsts, counts = [0] * shard.ndim, list(shard.shape)
    mesh = shard.device_mesh
    for axis in reversed(range(mesh.ndim)):
        dim = getattr(shard.placements[axis], "dim", None)
        if dim is not None:
            first, counts[dim] = _chunk(counts[dim], mesh.size(axis), mesh.get_local_rank(axis))
            firsts[dim] += first
    assert math.prod(counts) == local(shard).numel(), f"{counts} of {shard.shape} as {shard.placements}"
    return list(zip(firsts, counts, strict=True))
