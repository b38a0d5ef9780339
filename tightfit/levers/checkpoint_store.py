"""Where the inputs of recomputed layers are kept until backward: on the GPU, or offloaded to host memory.

To the host: a layer's input is copied on a side stream while the layer runs. The GPU's copy is freed when the next
layer begins (the compute stream waits for the copy, which has usually long ended), so only one input is on the GPU.

Back: while a layer is recomputed, the input of the layer below is prefetched. Its GPU memory comes from the compute
stream's allocator: the side stream waits for all work queued before, after which that memory is free, and the compute
stream waits for the copy. Every step allocates the same sizes and gets the same blocks; unlike a fixed pair of buffers,
they take no memory during forward.

The first layers' inputs are offloaded, as they are kept longest; the last one stays, as backward begins with it. Host
buffers are allocated once and reused; before the first, free host memory is compared with the size of all. In a
pipeline the inputs of several micro-batches are on the host at once; each forward pass of a stage has its own chain of
prefetches. On CPUs there are no streams; the order is the same.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.errors import UserError
from tightfit.hardware.host import free_host_bytes
from tightfit.levers.checkpoint_format import Format, restored, stored
from tightfit.levers.policy.offload import offloaded_count, stored_bytes
from tightfit.levers.side_stream import SideStream, current_stream_waits_for
from tightfit.memory.host import claimed, host_empty

Parts = tuple[Tensor, ...]
GIB = 2**30


class KeptInput:
    """A layer's input, kept on the GPU."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.requires_grad = x.detach(), x.requires_grad

    def fetch(self) -> Tensor:
        """The input, for recomputing the layer."""
        return self.x.detach().requires_grad_(self.requires_grad)

    def prefetch(self) -> None:
        """Nothing to do: the input is on the GPU."""


class InputOnGpu(KeptInput):
    """An input kept on the GPU while those of earlier layers are on the host."""

    def __init__(self, x: Tensor, previous: "KeptInput | None") -> None:
        super().__init__(x)
        self.previous = previous

    def fetch(self) -> Tensor:
        """The input; starts prefetching that of the layer below."""
        if self.previous is not None:
            self.previous.prefetch()
        return super().fetch()


class InputOnHost(KeptInput):
    """A layer's input, offloaded to the host."""

    def __init__(self, store: "HostStore", x: Tensor, parts: Parts, previous: KeptInput | None) -> None:
        self.store, self.previous = store, previous
        self.shape, self.dtype, self.device, self.requires_grad = x.shape, x.dtype, x.device, x.requires_grad
        self.parts = parts
        self.on_gpu: Parts | None = None
        self.copied: Any = None
        """The event of the copy to the GPU."""

    def prefetch(self) -> None:
        """Start copying the input to the GPU, once."""
        if self.on_gpu is None:
            self.on_gpu, self.copied = self.store.copy_to_gpu(self.parts, self.device)

    def fetch(self) -> Tensor:
        """The input; starts prefetching that of the layer below."""
        self.prefetch()
        current_stream_waits_for(self.copied)
        assert self.on_gpu is not None
        x = restored(self.on_gpu, self.shape, self.dtype)
        self.on_gpu = self.copied = None
        if self.previous is not None:
            self.previous.prefetch()
        return x.requires_grad_(self.requires_grad)

    def __del__(self) -> None:
        """Recycle the host buffers. A copy in flight must end before its GPU memory is reused."""
        if getattr(self, "copied", None) is not None:
            current_stream_waits_for(self.copied)
        if hasattr(self, "parts"):
            self.store.recycle(self.parts)


class HostStore:
    """Host buffers, and the stream that copies to and from them, for all layers of a model."""

    def __init__(self, host_bytes: int | None, form: Format) -> None:
        self.host_bytes, self.form = host_bytes, form
        self.free: dict[tuple[tuple[torch.Size, torch.dtype], ...], list[Parts]] = {}
        self.allocated = 0
        self._side: SideStream | None = None
        self._sending: tuple[Parts, Any] | None = None
        """GPU tensors being copied to the host, and the event of that copy."""
        self._latest: weakref.ref[KeptInput] | None = None

    def keep(self, x: Tensor, index: int, count: int, *, follows: bool) -> KeptInput:
        """Keep x, the input of recomputed layer `index` of this rank's `count`.

        `follows`: the last input kept is that of the layer below in the same forward pass.
        """
        self._free_sent()
        previous = self._latest() if self._latest is not None and follows else None
        rows = x.numel() // x.shape[-1]
        offloaded = offloaded_count(
            count, stored_bytes(rows, x.shape[-1], x.element_size(), self.form), self.host_bytes
        )
        kept = self._offload(x, previous, offloaded) if index < offloaded else InputOnGpu(x, previous)
        self._latest = weakref.ref(kept)
        return kept

    def _offload(self, x: Tensor, previous: KeptInput | None, wanted: int) -> KeptInput:
        side = self._stream(x.device)
        encoded = stored(x.detach(), self.form)
        parts = self._buffers(encoded, x.device, wanted)
        side.wait_for_current_stream()
        with side:
            for host, gpu in zip(parts, encoded, strict=True):
                host.copy_(gpu, non_blocking=True)
        self._sending = encoded, side.record_event()
        return InputOnHost(self, x, parts, previous)

    def copy_to_gpu(self, parts: Parts, device: torch.device) -> tuple[Parts, Any]:
        """Start copying `parts` to the GPU; returns the copies and the event after which they are complete."""
        side = self._stream(device)
        on_gpu = tuple(
            claimed(torch.empty(part.shape, dtype=part.dtype, device=device), "activations", "checkpoints arriving")
            for part in parts
        )
        side.wait_for_current_stream()
        with side:
            for gpu, host in zip(on_gpu, parts, strict=True):
                gpu.copy_(host, non_blocking=True)
        return on_gpu, side.record_event()

    def recycle(self, parts: Parts) -> None:
        """Take host buffers back for reuse. One stream reads and writes them, so new writes follow pending reads."""
        self.free.setdefault(_kind(parts), []).append(parts)

    def _free_sent(self) -> None:
        """Free the GPU's copy of the previous layer's input, once it is on the host."""
        if self._sending is not None:
            current_stream_waits_for(self._sending[1])
            self._sending = None

    def _buffers(self, like: Parts, device: torch.device, wanted: int) -> Parts:
        free = self.free.setdefault(_kind(like), [])
        if free:
            return free.pop()
        if not isinstance(like[0], FakeTensor):
            self._require_room(sum(part.nbytes for part in like), max(1, wanted - self.allocated))
        self.allocated += 1
        return tuple(
            host_empty(part.shape, part.dtype, device, "activations", "offloaded checkpoints") for part in like
        )

    def _require_room(self, each_bytes: int, count: int) -> None:
        free = free_host_bytes()
        if free is not None and each_bytes * count > free:
            raise UserError(
                f"levers.offload_checkpoints needs {count} times {each_bytes / GIB:.3g} GiB of host memory, but "
                f"{free / GIB:.3g} GiB are free; set levers.checkpoint_host_bytes below that"
            )

    def _stream(self, device: torch.device) -> SideStream:
        if self._side is None:
            self._side = SideStream(device)
        return self._side


def _kind(parts: Parts) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    return tuple((part.shape, part.dtype) for part in parts)
