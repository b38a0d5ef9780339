"""Where the inputs of recomputed layers wait for backward: on the GPU, or in host memory.

To the host: a layer's input is copied on a side stream while the layer runs. The GPU's copy is held until the next
layer begins, by when the copy has usually long ended (the compute stream waits for it all the same), so that none but
the input at work is there. Back: when a layer is computed again, the input of the one before it in the model is on its
way. It arrives in memory that the compute stream's allocator gives and takes back; the side stream waits for what was
queued before, so the memory is free by then, and the compute stream for the copy. Every step asks for the same sizes
and so gets the same blocks: nothing is reserved while forward runs, as a fixed pair of buffers would be.

The first layers' inputs go: they wait longest. The last one stays, as backward begins with it. Host buffers are made
once and handed round; what they need is compared with what the host has free before the first is made.
On CPUs there are no streams and the order is the same.
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
from tightfit.levers.side_stream import SideStream, current_waits_for
from tightfit.memory.host import claimed, host_empty

Parts = tuple[Tensor, ...]
GIB = 2**30


class Waiting:
    """A layer's input that waits on the GPU."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.requires_grad = x.detach(), x.requires_grad

    def fetch(self) -> Tensor:
        """The input, for computing the layer again."""
        return self.x.detach().requires_grad_(self.requires_grad)

    def prefetch(self) -> None:
        """It is there."""


class WaitingNext(Waiting):
    """One that waits on the GPU while others are on the host: fetching it calls the one before."""

    def __init__(self, x: Tensor, before: "Waiting | None") -> None:
        super().__init__(x)
        self.before = before

    def fetch(self) -> Tensor:
        """The input; the next one to be asked for is on its way from here on."""
        if self.before is not None:
            self.before.prefetch()
        return super().fetch()


class WaitingOnHost(Waiting):
    """A layer's input that waits on the host."""

    def __init__(self, store: "HostStore", x: Tensor, parts: Parts, before: Waiting | None) -> None:
        self.store, self.before = store, before
        self.shape, self.dtype, self.device, self.requires_grad = x.shape, x.dtype, x.device, x.requires_grad
        self.parts = parts
        self.arriving: Parts | None = None
        self.mark: Any = None

    def prefetch(self) -> None:
        """Let it come to the GPU, beside what is queued there from now on."""
        if self.arriving is None:
            self.arriving, self.mark = self.store.bring(self.parts, self.device)

    def fetch(self) -> Tensor:
        """The input; the next one to be asked for is on its way from here on."""
        self.prefetch()
        current_waits_for(self.mark)
        assert self.arriving is not None
        x = restored(self.arriving, self.shape, self.dtype)
        self.arriving = self.mark = None
        if self.before is not None:
            self.before.prefetch()
        return x.requires_grad_(self.requires_grad)

    def __del__(self) -> None:
        """Its host buffers serve the next step. What is on its way to the GPU must not land in memory of others."""
        if getattr(self, "mark", None) is not None:
            current_waits_for(self.mark)
        if hasattr(self, "parts"):
            self.store.give_back(self.parts)


class HostStore:
    """Host buffers and the stream that fills and reads them, for all layers of a model."""

    def __init__(self, host_bytes: int | None, form: Format) -> None:
        self.host_bytes, self.form = host_bytes, form
        self.free: dict[tuple[tuple[torch.Size, torch.dtype], ...], list[Parts]] = {}
        self.made = 0
        self._side: SideStream | None = None
        self._leaving: tuple[Parts, Any] | None = None
        self._latest: weakref.ref[Waiting] | None = None

    def keep(self, x: Tensor, place: int, count: int) -> Waiting:
        """Keep x, the input of the `place`-th of `count` recomputed layers of a forward pass."""
        self._let_go()
        before = self._latest() if self._latest is not None and place else None
        rows = x.numel() // x.shape[-1]
        offloaded = offloaded_count(
            count, stored_bytes(rows, x.shape[-1], x.element_size(), self.form), self.host_bytes
        )
        kept = self._send(x, before, offloaded) if place < offloaded else WaitingNext(x, before)
        self._latest = weakref.ref(kept)
        return kept

    def _send(self, x: Tensor, before: Waiting | None, wanted: int) -> Waiting:
        side = self._stream(x.device)
        leaving = stored(x.detach(), self.form)
        parts = self._buffers(leaving, x.device, wanted)
        side.wait_for_current()
        with side:
            for there, here in zip(parts, leaving, strict=True):
                there.copy_(here, non_blocking=True)
        self._leaving = leaving, side.mark()
        return WaitingOnHost(self, x, parts, before)

    def bring(self, parts: Parts, device: torch.device) -> tuple[Parts, Any]:
        """Copies of `parts` that will be on the GPU at the mark returned with them."""
        side = self._stream(device)
        made = tuple(
            claimed(torch.empty(part.shape, dtype=part.dtype, device=device), "activations", "checkpoints arriving")
            for part in parts
        )
        side.wait_for_current()
        with side:
            for here, there in zip(made, parts, strict=True):
                here.copy_(there, non_blocking=True)
        return made, side.mark()

    def give_back(self, parts: Parts) -> None:
        """Nobody needs what is in these host buffers; the stream reads them before it writes them again."""
        self.free.setdefault(_kind(parts), []).append(parts)

    def _let_go(self) -> None:
        """What was copied while the layer before ran may be overwritten after the copy."""
        if self._leaving is not None:
            current_waits_for(self._leaving[1])
            self._leaving = None

    def _buffers(self, like: Parts, device: torch.device, wanted: int) -> Parts:
        free = self.free.setdefault(_kind(like), [])
        if free:
            return free.pop()
        if not isinstance(like[0], FakeTensor):
            self._require_room(sum(part.nbytes for part in like), max(1, wanted - self.made))
        self.made += 1
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
