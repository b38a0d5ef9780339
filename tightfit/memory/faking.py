"""Faking: torch's fake tensors, answered from memory, and followed by a tracer without a mode of its own.

A training step repeats the same operations on the same shapes, layer after layer. What an operation makes of fake
tensors depends on their metadata alone, so the first answer is kept as a recipe (new memory of this shape, a view of
that argument, the argument itself) and later calls are made from it. Torch keeps such answers too, but not those of our
own operators, and describes every argument at length to look one up. Reads of a device, which are most of what autograd
asks of a fake tensor, are answered at once; and one mode does what three would (fake tensors, reads, the tracer).
Together they leave a third of a rehearsal's time. Recipes are for all simulations of a process.

Not kept: answers that depend on values or on more than metadata (constants, subclasses, symbolic sizes, operations that
change an argument's shape or storage) and any whose memory the recipe would not reproduce; torch answers those itself.
Tensors that a program makes outside fake tensors on purpose, such as a device mesh's table of ranks, are not followed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tightfit.memory.tracing import Tracer

aten = torch.ops.aten
DEVICE = torch.ops.prim.device.default
READ = aten._local_scalar_dense.default
ABSOLUTE = (aten.as_strided.default, aten.view.dtype)
"""Views whose offset is not so many elements from where their argument begins."""
UNFAKED = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)
"""Marks for profilers, which have no tensors."""
META, CPU = torch.device("meta"), torch.device("cpu")
PLAIN = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
)
NOT_KEPT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)


@dataclass(frozen=True, slots=True)
class Part:
    """One result: argument `source` itself where it has no shape, else a view `offset` further, else new memory."""

    source: int | None
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Recipe:
    """What an operation makes: nothing, one part, or a row of them in `kind`."""

    kind: type | None
    parts: tuple[Part | None, ...]


_recipes: dict[tuple[Any, ...], tuple[Any, Recipe | None]] = {}
"""By operation (its id, as its hash is Python's to work out; it is kept alive beside the recipe) and metadata."""


class Faking(FakeTensorMode):
    """Inside the block tensors are fake, whatever is read off them is one, and `tracer` follows every operation."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer
        self.cache_enabled = False  # torch's own, which ours is in place of
        self._inside = False
        self._state = dict(FakeTensor(self, torch.empty(0, device=META), CPU).__dict__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and turning the compiler off for every call costs more than the call

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch for every operation."""
        if func is DEVICE and type(args[0]) is FakeTensor:
            return args[0].device
        if func is READ:
            return _one(args[0].dtype)
        if self._inside:  # a part of what an operation is made of
            return self._answer(func, types, args, kwargs or {})
        self._inside = True
        try:
            return self.tracer.follow(self._answer, func, types, args, kwargs or {})
        finally:
            self._inside = False

    def _answer(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func in UNFAKED:
            return func(*args, **kwargs)
        key: list[Any] = [id(func), torch.get_default_dtype()]
        tensors: list[FakeTensor] = []
        if not self._read(args, key, tensors) or (kwargs and not self._read_named(kwargs, key, tensors)):
            return self.dispatch(func, types, args, kwargs)
        if func in ABSOLUTE:
            key += (tensor.storage_offset() for tensor in tensors)
        known = tuple(key)
        try:
            _, recipe = _recipes[known]
        except KeyError:
            made = self.dispatch(func, types, args, kwargs)
            _recipes[known] = func, _recipe(func, made, tensors)
            return made
        return self.dispatch(func, types, args, kwargs) if recipe is None else self._cook(recipe, tensors)

    def _read_named(self, kwargs: Mapping[str, Any], key: list[Any], tensors: list[FakeTensor]) -> bool:
        key += kwargs
        return self._read(kwargs.values(), key, tensors)

    def _read(self, values: Any, key: list[Any], tensors: list[FakeTensor]) -> bool:
        """Whether `values` are fully described by what is added to `key`."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.constant is not None or value.fake_mode is not self:
                    return False
                tensors.append(value)
                key += (value.dtype, value.shape, value.stride(), value.requires_grad, value.fake_device)
            elif kind in PLAIN:
                key += (kind, value)
            elif kind is list or kind is tuple:
                key += (kind, len(value))
                if not self._read(value, key, tensors):
                    return False
            else:
                return False
        return True

    def _cook(self, recipe: Recipe, tensors: list[FakeTensor]) -> Any:
        if recipe.kind is None:
            return None if not recipe.parts else self._part(recipe.parts[0], tensors)
        return recipe.kind([self._part(part, tensors) for part in recipe.parts])

    def _part(self, part: Part | None, tensors: list[FakeTensor]) -> Any:
        if part is None:
            return None
        if part.shape is None:
            return tensors[part.source]  # type: ignore[index]
        bare = aten.empty_strided.default(part.shape, part.stride, dtype=part.dtype, device=META)
        if part.source is not None:
            source = tensors[part.source]
            offset = source.storage_offset() + part.offset
            aten.set_.source_Storage_storage_offset(bare, source.untyped_storage(), offset, part.shape, part.stride)
        made = Tensor._make_subclass(FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=CPU)
        made.__dict__.update(self._state)
        return made


def _one(dtype: torch.dtype) -> bool | int | float:
    """Whatever a program reads off a fake tensor: counts, norms and flags have no values here."""
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


def _recipe(func: Any, made: Any, tensors: list[FakeTensor]) -> Recipe | None:
    """How to make `made` again from tensors like these; None where that is not known."""
    if not isinstance(func, OpOverload) or any(tag in func.tags for tag in NOT_KEPT):
        return None
    if made is None:
        return Recipe(None, ())
    several = type(made) in (tuple, list)
    results = made if several else (made,)
    parts = [None if result is None else _part_of(func, result, tensors) for result in results]
    pairs = [(result, part) for result, part in zip(results, parts, strict=True) if result is not None]
    own = [result.untyped_storage()._cdata for result, part in pairs if part is not None and part.source is None]
    if any(part is None for _, part in pairs) or len(set(own)) < len(own):  # or results share new memory
        return None
    return Recipe(type(made) if several else None, tuple(parts))


def _part_of(func: Any, result: Any, tensors: list[FakeTensor]) -> Part | None:
    if type(result) is not FakeTensor or result.constant is not None or result.fake_device != CPU:
        return None
    same = [at for at, tensor in enumerate(tensors) if tensor is result]
    if same:
        return Part(same[0]) if len(same) == 1 else None
    if result.requires_grad or result.dtype.is_complex:
        return None
    storage = result.untyped_storage()
    sharing = [at for at, tensor in enumerate(tensors) if tensor.untyped_storage()._cdata == storage._cdata]
    shape, stride, offset = tuple(result.shape), result.stride(), result.storage_offset()
    if sharing:
        source = tensors[sharing[0]]
        known = len(sharing) == 1 and (func in ABSOLUTE or result.dtype == source.dtype)
        return Part(sharing[0], shape, stride, int(offset - source.storage_offset()), result.dtype) if known else None
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if result.numel() else -1
    exact = offset == 0 and storage.nbytes() == (last + 1) * result.element_size()
    return Part(None, shape, stride, 0, result.dtype) if exact else None
