"""What a rank holds of named tensors, in few messages, and all ranks' parts put together.

Gathering each tensor over all ranks costs more than the training of these tiny models does. So ranks answer with what
is theirs and with its place in the whole, and who asked them puts it together: every element must be there, and what
several ranks hold must be the same to the bit.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tightfit.collectives.shards import local, local_region

Place = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Parts:
    """Name, whole shape, place and dtype of each part, and the values of all of them, one after another, by dtype."""

    entries: list[tuple[str, torch.Size, Place, torch.dtype]]
    values: dict[torch.dtype, Tensor]


def held(named: Mapping[str, Tensor]) -> Parts:
    """A copy of what is here of every tensor."""
    entries = [(name, tensor.shape, local_region(tensor), tensor.dtype) for name, tensor in named.items()]
    flat = [local(tensor).detach().reshape(-1) for tensor in named.values()]
    dtypes = {tensor.dtype for tensor in flat}
    return Parts(entries, {dtype: torch.cat([t for t in flat if t.dtype == dtype]) for dtype in dtypes})


def united(everyones: Sequence[Parts]) -> dict[str, Tensor]:
    """The whole tensors."""
    found: dict[str, Tensor] = {}
    missing: dict[str, Tensor] = {}
    for rank, parts in enumerate(everyones):
        for (name, shape, where, dtype), part in zip(parts.entries, _cut(parts), strict=True):
            whole = found.setdefault(name, torch.zeros(shape, dtype=dtype))
            absent = missing.setdefault(name, torch.ones(shape, dtype=torch.bool))
            assert (whole.shape, whole.dtype) == (shape, dtype), f"{name} of rank {rank} is {dtype} {shape}"
            region = tuple(slice(first, first + count) for first, count in where)
            if part.numel() and not absent[region].all():
                assert not absent[region].any(), f"{name} of rank {rank} overlaps another's part"
                assert _bits(whole[region]).equal(_bits(part)), f"ranks differ in {name}"
            whole[region], absent[region] = part, False
    assert not [name for name, absent in missing.items() if absent.any()], "no rank has some elements"
    return found


def _cut(parts: Parts) -> list[Tensor]:
    """The values of each entry, in its shape."""
    found, used = [], Counter[torch.dtype]()
    for _, _, where, dtype in parts.entries:
        shape = [count for _, count in where]
        first, used[dtype] = used[dtype], used[dtype] + math.prod(shape)
        found.append(parts.values[dtype][first : used[dtype]].view(shape))
    return found


def _bits(tensor: Tensor) -> Tensor:
    """Which are equal where both are not numbers, too."""
    return tensor.reshape(-1).view(torch.uint8)
