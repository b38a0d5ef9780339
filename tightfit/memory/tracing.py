"""Tracing: records every tensor's allocation and free in a program, on fake or real tensors.

A dispatch mode sees each operation's results; a weak reference to each new storage reports when it dies. FSDP2 frees
and reallocates storages without an operation, so `UntypedStorage.resize_` is patched too (as in torch's MemTracker).
Workspaces are invisible to a dispatch mode; `scratch` computes them (cuda_rules.py).

Components: parameters, master weights, states and gradients are claimed by the code that knows them; the rest follows
from the phase and the module in which it was allocated.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from tightfit.memory.cuda_rules import PRODUCTS
from tightfit.memory.host import watched
from tightfit.memory.ledger import Component, Phase
from tightfit.memory.trace import Allocation, Trace

Scratch = Callable[[Any, tuple[Any, ...], dict[str, Any]], int]
Run = Callable[[Any, Any, Any, Any], Any]
KINDS = (("attention", "attention"), ("mlp", "mlp"), ("norm", "norms"), ("embed", "embedding"))
COMMUNICATION = ("fsdp", "c10d", "_c10d_functional")
OWNER_DEPTH = 9
SKIPPED = torch.ops.prim.device.default
SUM = torch.ops.aten.add.Tensor
BACKWARD = ("backward", "first step")
ENGINE = "_engine_run_backward"
DISPATCHERS = ("follow", "__torch_dispatch__", "_fn", "inner")
OWN_REFERENCES = 2
"""Use count of a storage that only one tensor uses: the tensor's reference, and that of the Python storage object."""


def no_scratch(operation: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> int:
    """The default `Scratch`: no workspaces."""
    return 0


class Tracer(TorchDispatchMode):
    """Fills `trace` while active. `scratch` gives the workspace bytes of an operation."""

    def __init__(self, scratch: Scratch = no_scratch) -> None:
        super().__init__()
        self.trace, self.scratch = Trace(), scratch
        self.phase: Phase = "load"
        self.modules: list[str] = []
        self.paused = False
        self.product_workspace_bytes = 0
        """Workspace that cuBLAS allocates in each thread that calls it: that of forward, and autograd's."""
        self._multiplying: set[bool] = set()
        self._known: dict[int, tuple[int, Any]] = {}
        self._streams: list[Any] = [torch.cpu.current_stream()]
        self._stack, self._listening = ExitStack(), ExitStack()
        self.trace.begin(self.phase)

    def __enter__(self) -> "Tracer":
        self._listening.enter_context(self.listening())
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._listening.close()

    @contextmanager
    def listening(self) -> Iterator["Tracer"]:
        """Inside the block resizes and claims are traced; the caller must pass operations to `follow`."""
        with _followed_resizes(self), watched(self.note), self._stack:
            try:
                yield self
            finally:
                self._known.clear()  # storages that die later are not frees of the traced program

    def begin(self, phase: Phase) -> None:
        """The program enters `phase`."""
        self.phase = phase
        self.trace.begin(phase)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Allocations inside the block are not traced, unless claimed later."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def begin_step(self) -> None:
        """Events from here on are one training step; those since the last call are the step before."""
        self.trace.previous_start, self.trace.step_start = self.trace.step_start, len(self.trace.events)

    def claim(self, tensors: Iterable[Tensor], component: Component, detail: str = "") -> None:
        """Assign these tensors' memory, traced already or not, to `component`."""
        for tensor in tensors:
            for part in _parts(tensor):
                self._see(part, "")
                number, _ = self._known.get(part.untyped_storage()._cdata, (None, None))
                if number is not None:
                    allocation = self.trace.allocations[number]
                    allocation.component = component
                    allocation.detail = detail or ("offloaded" if allocation.place == "host" else "")

    def note(self, tensor: Tensor, component: Component | None, detail: str, *, host: bool) -> None:
        """The Watcher of memory/host.py: record component and place of a tensor."""
        if component is not None:
            self.claim([tensor], component, detail)
        number, _ = self._known.get(tensor.untyped_storage()._cdata, (None, None))
        if number is not None and host:
            self.trace.allocations[number].place = "host"

    def claim_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Assign these parameters' gradients to `gradients` as soon as backward has accumulated them."""
        for parameter in parameters:
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(self._claim_gradient)
                _to_front(parameter._post_accumulate_grad_hooks, hook.id)
                self._stack.callback(hook.remove)

    def _claim_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.claim([parameter.grad], "gradients")

    def name_modules(self, model: nn.Module) -> None:
        """Record the module in which memory is allocated (linear layers count as their parent module)."""
        handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):  # hooks would keep it out of fused operations (`can_fuse`)
                continue
            handles.append(module.register_forward_pre_hook(_entering(self.modules, name)))
            handles.append(module.register_forward_hook(_leaving(self.modules), always_call=True))
        for handle in handles:
            self._stack.callback(handle.remove)

    def loss_follows(self, module: nn.Module) -> None:
        """Begin the phase `loss` after the forward of `module`, the last before the output projection."""
        hook = module.register_forward_hook(lambda *_: self.begin("loss") if self.phase == "forward" else None)
        self._stack.callback(hook.remove)

    def cut_backward(self, module: nn.Module) -> None:
        """Begin another section of backward where it enters `module`."""

        def watch(layer: nn.Module, arguments: Any, result: Any) -> None:
            first = result[0] if isinstance(result, tuple) else result
            if self.phase == "forward" and first.requires_grad:
                first.register_hook(lambda gradient: self.begin("backward"))

        self._stack.callback(module.register_forward_hook(watch).remove)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.follow(_call, func, types, args, kwargs or {})

    def follow(self, run: Run, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation by `run`, tracing its workspace and its results."""
        if func is SKIPPED or self.paused:
            return run(func, types, args, kwargs)
        for kind in types:
            if kind is not FakeTensor and issubclass(kind, _dtensor()):
                return NotImplemented  # DTensor's local operations are traced
        if self.product_workspace_bytes and len(self._multiplying) < 2 and func._schema.name in PRODUCTS:
            self._take_workspace()
        held = self.scratch(func, args, kwargs)
        number = self.trace.allocate(self._scratch(held, func)) if held else None
        summed = self._summed_in_place(args) if func is SUM and self.phase in BACKWARD else None
        result = run(func, types, args, kwargs)
        if summed is not None:
            self._take_over(summed, result)
        elif isinstance(result, Tensor):
            self._see(result, func)
        elif isinstance(result, (tuple, list)):
            for part in result:
                if isinstance(part, Tensor):
                    self._see(part, func)
        if number is not None:
            self.trace.free(number)
        return result

    def _take_workspace(self) -> None:
        """Trace cuBLAS's workspace at the first product of the current thread; it is never freed."""
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward not in self._multiplying:
            self._multiplying.add(in_backward)
            self.trace.allocate(Allocation(self.product_workspace_bytes, "workspace", "cuBLAS", once=True))

    def _summed_in_place(self, operands: tuple[Any, ...]) -> int | None:
        """The storage into which autograd would add a second gradient in place; with fake tensors it allocates a sum,
        which must not be counted. None for any other addition."""
        first = operands[0]
        if not isinstance(first, FakeTensor) or not first.is_contiguous() or not _called_by_engine():
            return None
        key: int = first.untyped_storage()._cdata
        alone = torch._C._storage_Use_Count(key) == OWN_REFERENCES
        return key if alone and key in self._known else None

    def _take_over(self, key: int, sum_: Tensor) -> None:
        number, _ = self._known.pop(key)
        storage = sum_.untyped_storage()
        self._known[storage._cdata] = (number, self._until_death(storage))

    def _scratch(self, held: int, func: Any) -> Allocation:
        return Allocation(held, "workspace", "kernels", self._module(), str(func))

    def _see(self, tensor: Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or not storage.nbytes() or tensor.device.type == "meta":  # shapes alone
            return
        self._follow(storage, self._described(storage.nbytes(), func))

    def _follow(self, storage: torch.UntypedStorage, allocation: Allocation) -> None:
        number = self.trace.allocate(allocation)
        self._known[storage._cdata] = (number, self._until_death(storage))
        self.remember(number, storage)

    def _until_death(self, storage: torch.UntypedStorage) -> Any:
        key = storage._cdata
        return weakref.ref(storage, lambda _: self._forget(key))

    def remember(self, number: int, storage: torch.UntypedStorage) -> None:
        """For subclasses: allocation `number` is this storage."""

    def _forget(self, key: int) -> None:
        number, _ = self._known.pop(key, (None, None))
        if number is not None:
            self.trace.free(number)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Trace that a storage has been freed or reallocated in place."""
        self._forget(storage._cdata)
        if storage.nbytes() and not self.paused:
            owner = _resizing_owner()
            self._follow(storage, Allocation(storage.nbytes(), *owner, self._module(), "resize"))

    def _module(self) -> str:
        return self.modules[-1] if self.modules else ""

    def _described(self, size: int, func: Any) -> Allocation:
        operation, module, stream = _name(func), self._module(), self._stream()
        owner = _sharding_owner() if stream or operation.startswith("aten.empty") else None
        if owner is None and operation.startswith(COMMUNICATION):
            owner = "communication", ""
        return Allocation(size, *(owner or _belongs(self.phase, module)), module, operation, stream)

    def _stream(self) -> int:
        """Index of the current (pretended) CPU stream; FSDP2 uses one for its collectives."""
        stream = torch.cpu.current_stream()
        if stream not in self._streams:
            self._streams.append(stream)
        return self._streams.index(stream)


_names: dict[int, tuple[Any, str]] = {}
"""Names by the operation's id, because `str` of an OpOverload builds the name at every call."""


def _name(func: Any) -> str:
    if (known := _names.get(id(func))) is None:
        known = _names[id(func)] = func, str(func)
    return known[1]


@cache
def _belongs(phase: Phase, module: str) -> tuple[Component, str]:
    """The component of unclaimed memory allocated in `phase` inside `module`."""
    kind = next((kind for part, kind in KINDS if part in module), "residual stream and tables")
    match phase:
        case "forward" | "evaluation" | "first step":
            return "activations", kind
        case "loss":
            return "logits and loss", ""
        case "backward":
            return "activations", f"recomputed {kind}" if module else "gradients of activations"
        case "optimizer":
            return "gradients", "widened for the update"
    return "weights", ""


def _called_by_engine() -> bool:
    """Whether the autograd engine itself made this call, rather than a backward formula or function."""
    frame = _caller(sys._getframe(2))
    return frame is not None and frame.f_code.co_name == ENGINE


def _caller(frame: Any) -> Any:
    """The frame that called the operation, below the dispatch machinery."""
    while frame is not None and frame.f_code.co_name in DISPATCHERS:
        frame = frame.f_back
    return frame


def _sharding_owner() -> tuple[Component, str] | None:
    """The component of memory that FSDP2 allocates, by the calling file: gathered weights or a collective's buffer."""
    frame = _caller(sys._getframe(3))
    for _ in range(OWNER_DEPTH):
        if frame is None:
            return None
        file = frame.f_code.co_filename
        if file.endswith("_fsdp_collectives.py"):
            return "communication", "collectives' buffers"
        if file.endswith("_fsdp_param.py"):
            return "weights", "gathered"
        frame = frame.f_back
    return None


def _to_front(hooks: Any, number: int) -> None:
    """Make a hook run before one that updates the parameter and frees the gradient: hooks run in insertion order."""
    others = [(key, hook) for key, hook in hooks.items() if key != number]
    own = hooks[number]
    hooks.clear()
    hooks.update([(number, own), *others])


def _resizing_owner() -> tuple[Component, str]:
    """The component of memory reallocated in place, by the calling file: FSDP2's weights or a block's input."""
    file = sys._getframe(3).f_code.co_filename
    return ("activations", "gathered again") if file.endswith("conjugate.py") else ("weights", "gathered")


def _entering(stack: list[str], name: str) -> Callable[..., None]:
    return lambda module, arguments: stack.append(name)


def _leaving(stack: list[str]) -> Callable[..., None]:
    def leave(module: nn.Module, arguments: Any, result: Any) -> None:
        if stack:
            stack.pop()

    return leave


def _call(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _dtensor() -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The local tensor of a DTensor; the tensor itself otherwise."""
    yield tensor.to_local() if isinstance(tensor, _dtensor()) else tensor


@contextmanager
def _followed_resizes(tracer: Tracer) -> Iterator[None]:
    """Patch `UntypedStorage.resize_` to tell `tracer` of every resize."""
    original: Any = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        tracer.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]
