"""Tensors of which every rank holds some rows: reading, filling and gathering them.

FSDP2 makes each parameter a DTensor split along its first dimension, as `torch.chunk` would: ranks hold equal numbers
of rows except the last ones, which may hold fewer or none. Everything here takes plain tensors too, treating them as
whole, so callers need not ask. Filling needs no communication: each rank has the whole value and keeps its own rows.
Limits: one mesh axis, split along the first dimension.
"""

import math
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


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
    """All rows of `tensor`. For a shard every rank must call this, and every rank gets them."""
    with torch.no_grad():
        return tensor.full_tensor() if is_shard(tensor) else tensor


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
    return _first_row(tensor) * math.prod(tensor.shape[1:]) if is_shard(tensor) else 0


@torch.no_grad()
def copy_whole(target: Tensor, values: Tensor, index: int | None = None) -> None:
    """Copy `values` into `target`, or into `target[index]`; of a shard, the rows that are here."""
    if not is_shard(target):
        (target if index is None else target[index]).copy_(values)
        return
    here, first = local(target), _first_row(target)
    if index is None:
        here.copy_(values[first : first + here.shape[0]])
    elif first <= index < first + here.shape[0]:
        here[index - first].copy_(values)


def _first_row(shard: "DTensor") -> int:
    """The number of the first row that is here."""
    from torch.distributed.tensor import Shard

    assert shard.device_mesh.ndim == 1, f"a shard over {shard.device_mesh.ndim} mesh axes"
    assert tuple(shard.placements) == (Shard(0),), f"a shard with placements {shard.placements}"
    rows_each = -(-shard.shape[0] // shard.device_mesh.size())
    return min(shard.device_mesh.get_local_rank() * rows_each, shard.shape[0])
