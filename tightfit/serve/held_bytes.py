"""Bytes that an engine on a CPU holds: measured over all that can be reached from it, not predicted.

A GPU's allocator counts for itself. The host's does not tell tensors from other memory, so tensors are searched for in
modules, in our own objects and in collections of those; a storage counts once, however many tensors are views of it.
Matrices that FBGEMM has packed are no tensors, but know their bytes.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from tightfit.serve.weights.half import HalfWeight

OURS = ("tightfit.", "torch.nn.")


def held_bytes(*roots: Any) -> int:
    """Bytes of all tensors and packed matrices that can be reached from `roots`."""
    storages: dict[int, int] = {}
    packed_bytes = 0
    seen: set[int] = set()
    left = list(roots)
    while left:
        part = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Tensor):
            storage = part.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(part, HalfWeight):
            packed_bytes += part.packed_bytes
        left += _parts(part)
    return sum(storages.values()) + packed_bytes


def _parts(part: Any) -> Iterable[Any]:
    """The items or attributes of `part` that may hold tensors."""
    if isinstance(part, Mapping):
        return part.values()
    if isinstance(part, list | tuple | set | frozenset):
        return part
    if isinstance(part, nn.Module) or type(part).__module__.startswith(OURS):
        slots = (getattr(part, name, None) for name in getattr(type(part), "__slots__", ()))
        return [*getattr(part, "__dict__", {}).values(), *slots]
    return ()
