"""A FakeTensorMode with a result cache of our own, which also runs the tracer.

A training step repeats the same operations on the same shapes, layer after layer. The result of an operation on fake
tensors depends on their metadata alone, so it is cached as a description (a new tensor of this shape, a view of that
argument, the argument itself), from which later results are built. Torch has such a cache too, but not for our own
operators, and its lookup keys are costly to compute. `prim.device`, autograd's most frequent call, returns without
dispatch; and one dispatch mode does the work of three (fake tensors, scalar reads, tracer). Together this cuts a
rehearsal's time to a third. The cache is shared by all simulations of a process.

Not cached: results that depend on values or on more than metadata (constants, subclasses, symbolic sizes, operations
that change an argument's shape or storage), and any whose memory the description would not reproduce; torch computes
those. Real tensors that a program makes on purpose, such as a device mesh's table of ranks, are not traced.
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
"""View operations whose storage offset is absolute, not relative to their argument's."""
UNFAKED = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)
"""Profiler marks, which have no tensors."""
META, CPU = torch.device("meta"), torch.device("cpu")
PLAIN = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
)
NOT_CACHED = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)


@dataclass(frozen=True, slots=True)
class CachedTensor:
    """One result tensor: argument `source` itself (no shape), a view of it at `offset`, or a new tensor (no source)."""

    source: int | None
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class CachedResult:
    """The result of an operation: no tensor, one tensor, or a `container` (tuple or list) of tensors."""

    container: type | None
    tensors: tuple[CachedTensor | None, ...]


_cached: dict[tuple[Any, ...], tuple[Any, CachedResult | None]] = {}
"""Results by operation and metadata of arguments; None for results not to cache. The key has the operation's id, as
hashing an OpOverload is slow Python; the value also keeps the operation alive."""


class Faking(FakeTensorMode):
    """Inside the block tensors are fake, scalars read from them are 1, and `tracer` sees every operation."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer
        self.cache_enabled = False  # torch's own, which ours replaces
        self._inside = False
        self._state = dict(FakeTensor(self, torch.empty(0, device=META), CPU).__dict__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and disabling dynamo costs more than a cached call

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch for every operation."""
        if func is DEVICE and type(args[0]) is FakeTensor:
            return args[0].device
        if func is READ:
            return _one(args[0].dtype)
        if self._inside:  # part of a composite operation, which is traced as a whole
            return self._run(func, types, args, kwargs or {})
        self._inside = True
        try:
            return self.tracer.follow(self._run, func, types, args, kwargs or {})
        finally:
            self._inside = False

    def _run(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func in UNFAKED:
            return func(*args, **kwargs)
        key: list[Any] = [id(func), torch.get_default_dtype()]
        tensors: list[FakeTensor] = []
        if not self._add_to_key(args, key, tensors) or (kwargs and not self._add_named(kwargs, key, tensors)):
            return self.dispatch(func, types, args, kwargs)
        if func in ABSOLUTE:
            key += (tensor.storage_offset() for tensor in tensors)
        whole_key = tuple(key)
        try:
            _, cached = _cached[whole_key]
        except KeyError:
            result = self.dispatch(func, types, args, kwargs)
            _cached[whole_key] = func, _describe(func, result, tensors)
            return result
        return self.dispatch(func, types, args, kwargs) if cached is None else self._build_from_cached(cached, tensors)

    def _add_named(self, kwargs: Mapping[str, Any], key: list[Any], tensors: list[FakeTensor]) -> bool:
        key += kwargs
        return self._add_to_key(kwargs.values(), key, tensors)

    def _add_to_key(self, values: Any, key: list[Any], tensors: list[FakeTensor]) -> bool:
        """Add the metadata of arguments to `key`; False where metadata does not describe them fully."""
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
                if not self._add_to_key(value, key, tensors):
                    return False
            else:
                return False
        return True

    def _build_from_cached(self, cached: CachedResult, tensors: list[FakeTensor]) -> Any:
        """The result, for arguments whose tensors are `tensors`."""
        if cached.container is None:
            return None if not cached.tensors else self._build_tensor(cached.tensors[0], tensors)
        return cached.container([self._build_tensor(tensor, tensors) for tensor in cached.tensors])

    def _build_tensor(self, cached: CachedTensor | None, tensors: list[FakeTensor]) -> Any:
        if cached is None:
            return None
        if cached.shape is None:
            return tensors[cached.source]  # type: ignore[index]
        # torch's functions and methods: operators that Python calls by name take six times as long
        bare = torch.empty_strided(cached.shape, cached.stride, dtype=cached.dtype, device=META)
        if cached.source is not None:
            source = tensors[cached.source]
            offset = source.storage_offset() + cached.offset
            bare.set_(source.untyped_storage(), offset, cached.shape, cached.stride)
        built = Tensor._make_subclass(FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=CPU)
        built.__dict__ = self._state.copy()
        return built


def _one(dtype: torch.dtype) -> bool | int | float:
    """The scalar that a program reads from a fake tensor (counts, norms, flags), which has no value."""
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


def _describe(func: Any, result: Any, tensors: list[FakeTensor]) -> CachedResult | None:
    """How to build `result` again from tensors like these; None where it must not be cached."""
    if not isinstance(func, OpOverload) or any(tag in func.tags for tag in NOT_CACHED):
        return None
    if result is None:
        return CachedResult(None, ())
    several = type(result) in (tuple, list)
    results = result if several else (result,)
    described = [None if each is None else _describe_tensor(func, each, tensors) for each in results]
    pairs = [(each, cached) for each, cached in zip(results, described, strict=True) if each is not None]
    new = [each.untyped_storage()._cdata for each, cached in pairs if cached is not None and cached.source is None]
    if any(cached is None for _, cached in pairs) or len(set(new)) < len(new):  # or results share new memory
        return None
    return CachedResult(type(result) if several else None, tuple(described))


def _describe_tensor(func: Any, result: Any, tensors: list[FakeTensor]) -> CachedTensor | None:
    if type(result) is not FakeTensor or result.constant is not None or result.fake_device != CPU:
        return None
    same = [at for at, tensor in enumerate(tensors) if tensor is result]
    if same:
        return CachedTensor(same[0]) if len(same) == 1 else None
    if result.requires_grad or result.dtype.is_complex:
        return None
    storage = result.untyped_storage()
    sharing = [at for at, tensor in enumerate(tensors) if tensor.untyped_storage()._cdata == storage._cdata]
    shape, stride, offset = tuple(result.shape), result.stride(), result.storage_offset()
    if sharing:
        source = tensors[sharing[0]]
        known = len(sharing) == 1 and (func in ABSOLUTE or result.dtype == source.dtype)
        relative = int(offset - source.storage_offset())
        return CachedTensor(sharing[0], shape, stride, relative, result.dtype) if known else None
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if result.numel() else -1
    exact = offset == 0 and storage.nbytes() == (last + 1) * result.element_size()
    return CachedTensor(None, shape, stride, 0, result.dtype) if exact else None
