"""What an engine on a CPU holds: the tensors that can be reached from it, which nobody predicted.

A GPU's allocator counts for itself. The host's does not tell tensors from all else, so they are looked for: in modules,
in our own objects and in collections of those; every storage once, however many tensors look at it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

OURS = ("tightfit.", "torch.nn.")


def held_bytes(*roots: Any) -> int:
    """Bytes of all tensors that can be reached from `roots`."""
    storages: dict[int, int] = {}
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
        left += _parts(part)
    return sum(storages.values())


def _parts(part: Any) -> Iterable[Any]:
    """What a thing is made of, as far as tensors may be in there."""
    if isinstance(part, Mapping):
        return part.values()
    if isinstance(part, list | tuple | set | frozenset):
        return part
    if isinstance(part, nn.Module) or type(part).__module__.startswith(OURS):
        slots = (getattr(part, name, None) for name in getattr(type(part), "__slots__", ()))
        return [*getattr(part, "__dict__", {}).values(), *slots]
    return ()
