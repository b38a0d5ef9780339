"""Tracing: follow every tensor's memory through a program, on fake tensors or real ones.

A dispatch mode sees each operation's results; a weak reference on each new storage tells when it dies. FSDP2 empties
and refills storages without an operation, so `UntypedStorage.resize_` is followed too (as torch's own MemTracker does).
What an operation holds only while it runs is invisible to any dispatch mode; `scratch` says it (cuda_rules.py).

Who a piece of memory belongs to: parameters, master weights, states and gradients are claimed by whoever knows them;
the rest follows from when it was made and inside which module.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

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
"""References to a storage that nobody else has: its tensor's, and that of the object we hold to look at it."""


def no_scratch(operation: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> int:
    """For devices on which operations are taken to need nothing beside their results."""
    return 0


class Tracer(TorchDispatchMode):
    """Fills `trace` while active. `scratch` says what an operation holds while it runs."""

    def __init__(self, scratch: Scratch = no_scratch) -> None:
        super().__init__()
        self.trace, self.scratch = Trace(), scratch
        self.phase: Phase = "load"
        self.modules: list[str] = []
        self.paused = False
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
        """Inside the block all is followed but operations, which whoever runs them gives to `follow`."""
        with _followed_resizes(self), watched(self.told), self._stack:
            try:
                yield self
            finally:
                self._known.clear()  # what dies from here on is the end of the program, not part of it

    def begin(self, phase: Phase) -> None:
        """The program enters `phase`."""
        self.phase = phase
        self.trace.begin(phase)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What is made inside is not seen, unless it is claimed later."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def begin_step(self) -> None:
        """From here on the events are those of one training step."""
        self.trace.step_start = len(self.trace.events)

    def claim(self, tensors: Iterable[Tensor], component: Component, detail: str = "") -> None:
        """These tensors' memory, already seen or not, is `component`."""
        for tensor in tensors:
            for part in _parts(tensor):
                self._see(part, "")
                number, _ = self._known.get(part.untyped_storage()._cdata, (None, None))
                if number is not None:
                    allocation = self.trace.allocations[number]
                    allocation.component = component
                    allocation.detail = detail or ("offloaded" if allocation.place == "host" else "")

    def told(self, tensor: Tensor, component: Component | None, detail: str, *, host: bool) -> None:
        """Whoever made `tensor` says what it is for, and whether it is in host memory (memory/host.py)."""
        if component is not None:
            self.claim([tensor], component, detail)
        number, _ = self._known.get(tensor.untyped_storage()._cdata, (None, None))
        if number is not None and host:
            self.trace.allocations[number].place = "host"

    def claim_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """The memory of these parameters' gradients is `gradients`, from the moment backward has made them."""
        for parameter in parameters:
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(self._claim_gradient)
                _to_front(parameter._post_accumulate_grad_hooks, hook.id)
                self._stack.callback(hook.remove)

    def _claim_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.claim([parameter.grad], "gradients")

    def name_modules(self, model: nn.Module) -> None:
        """Know inside which module memory is made (linear layers count with the module they are part of)."""
        handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):  # hooks on them would keep them out of fused operations
                continue
            handles.append(module.register_forward_pre_hook(_entering(self.modules, name)))
            handles.append(module.register_forward_hook(_leaving(self.modules), always_call=True))
        for handle in handles:
            self._stack.callback(handle.remove)

    def loss_follows(self, module: nn.Module) -> None:
        """The loss begins where a forward pass leaves `module`, the last before the output projection."""
        hook = module.register_forward_hook(lambda *_: self.begin("loss") if self.phase == "forward" else None)
        self._stack.callback(hook.remove)

    def cut_backward(self, module: nn.Module) -> None:
        """Begin another stretch of backward where it enters `module`."""

        def watch(layer: nn.Module, arguments: Any, made: Any) -> None:
            first = made[0] if isinstance(made, tuple) else made
            if self.phase == "forward" and first.requires_grad:
                first.register_hook(lambda gradient: self.begin("backward"))

        self._stack.callback(module.register_forward_hook(watch).remove)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.follow(_call, func, types, args, kwargs or {})

    def follow(self, run: Run, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """The operation's results, by `run`; their memory is followed from here on."""
        if func is SKIPPED or self.paused:
            return run(func, types, args, kwargs)
        for kind in types:
            if kind is not FakeTensor and issubclass(kind, _dtensor()):
                return NotImplemented  # its own local operations come back here
        held = self.scratch(func, args, kwargs)
        number = self.trace.allocate(self._scratch(held, func)) if held else None
        summed = self._summed_in_place(args) if func is SUM and self.phase in BACKWARD else None
        made = run(func, types, args, kwargs)
        if summed is not None:
            self._take_over(summed, made)
        elif isinstance(made, Tensor):
            self._see(made, func)
        elif isinstance(made, (tuple, list)):
            for part in made:
                if isinstance(part, Tensor):
                    self._see(part, func)
        if number is not None:
            self.trace.free(number)
        return made

    def _summed_in_place(self, operands: tuple[Any, ...]) -> int | None:
        """The storage that autograd would add a second gradient into, which it does not do with fake tensors."""
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
        if key in self._known or not storage.nbytes():
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
        """Allocation `number` is this storage; for those who need to know where it is."""

    def _forget(self, key: int) -> None:
        number, _ = self._known.pop(key, (None, None))
        if number is not None:
            self.trace.free(number)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has been emptied or refilled in place."""
        self._forget(storage._cdata)
        if storage.nbytes() and not self.paused:
            owner = _resizing_owner()
            self._follow(storage, Allocation(storage.nbytes(), *owner, self._module(), "resize"))

    def _module(self) -> str:
        return self.modules[-1] if self.modules else ""

    def _described(self, size: int, func: Any) -> Allocation:
        operation, module, stream = str(func), self._module(), self._stream()
        owner = _sharding_owner() if stream or operation.startswith("aten.empty") else None
        if owner is None and operation.startswith(COMMUNICATION):
            owner = "communication", ""
        return Allocation(size, *(owner or _belongs(self.phase, module)), module, operation, stream)

    def _stream(self) -> int:
        """Which of the CPU's pretended streams is current; FSDP2 enters those of its collectives there too."""
        stream = torch.cpu.current_stream()
        if stream not in self._streams:
            self._streams.append(stream)
        return self._streams.index(stream)


def _belongs(phase: Phase, module: str) -> tuple[Component, str]:
    """What memory made in `phase` inside `module` is, unless somebody claims it."""
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
    """Whether autograd itself, and no formula or function of somebody's, made this call."""
    frame = _caller(sys._getframe(2))
    return frame is not None and frame.f_code.co_name == ENGINE


def _caller(frame: Any) -> Any:
    """The frame that asked for the operation which `frame` is part of following."""
    while frame is not None and frame.f_code.co_name in DISPATCHERS:
        frame = frame.f_back
    return frame


def _sharding_owner() -> tuple[Component, str] | None:
    """What FSDP2 makes empty memory for, by the file that asks for it: gathered weights, or a collective's buffer."""
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
    """Call this hook before one that updates the parameter and drops the gradient; autograd goes by insertion."""
    others = [(key, hook) for key, hook in hooks.items() if key != number]
    own = hooks[number]
    hooks.clear()
    hooks.update([(number, own), *others])


def _resizing_owner() -> tuple[Component, str]:
    """Whose memory is refilled in place, by the file that does it: FSDP2's weights, or tensor ranks' streams."""
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
    """The plain tensors whose storages a tensor stands for."""
    yield tensor.to_local() if isinstance(tensor, _dtensor()) else tensor


@contextmanager
def _followed_resizes(tracer: Tracer) -> Iterator[None]:
    """Tell `tracer` of every storage that is resized in place while it is active."""
    original: Any = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        made = original(storage, size)
        tracer.resized(storage)
        return made

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]
