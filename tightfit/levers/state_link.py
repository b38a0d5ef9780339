"""Optimizer states that live on the host and pass through the GPU, a piece at a time, to be updated there.

Twelve bytes a weight go in and out, both ways at once; the host's cores are left alone, and the arithmetic is the
GPU's own, so the result is that of states that never left, to the bit. (Where the host is faster than its link it can
update float32 states itself: host_update.py.) Copies in, updates and copies out each have a stream:

    in      piece 3  piece 4 …         waits for a free slot of the ring
    update     piece 2  piece 3 …      waits for the piece, and for the gradient
    out           piece 1  piece 2 …   frees the slot

Nobody waits on the host. The step's own stream waits for an update where the weight is used next, in the forward pass
that follows, or earlier where too many bytes of gradients would wait for the link.
Gradients of the last layers come first and their weights are needed last, so some of these (`late`) are put off until
backward is over: then the link works through the next forward pass as well. Without updates inside backward all are.
What is put off goes in the order of the forward pass, a little ahead of it: sending a model's pieces all at once takes
the host longer than a layer takes the GPU, which would have nothing to do meanwhile.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tightfit.levers.host_update import HostUpdates, HostWork
from tightfit.levers.policy.offload import IN_FLIGHT_BYTES, PIECE_ELEMENTS, STATE_SLOTS
from tightfit.levers.side_stream import Mark, SideStream, current_mark, current_waits_for
from tightfit.memory.host import claimed

ALIGNMENT = 256

UpdatePiece = Callable[[dict[str, Tensor], slice], None]
"""Updates some rows of a matrix, with those of its host tensors that are on the GPU now, by kind."""


@dataclass
class Home:
    """Where the states of one matrix live, each with a row per row of it, and when all will be up to date."""

    rows: int
    width: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    weight_away: bool = False
    """Nothing of the weight stays on the GPU."""
    place: int = 0
    """When the forward pass needs it, against others."""
    updates: int = 0
    """That have been sent."""
    updated: Mark = None
    """When the weight on the GPU has been written."""
    settled: Mark = None
    """When the host has the states back."""

    def add(self, kind: str, tensor: Tensor) -> None:
        """`tensor`, on the host, is that kind of its states."""
        self.tensors[kind] = tensor.view(self.rows, -1)

    @property
    def rows_per_piece(self) -> int:
        """Rows that are updated at a time."""
        return max(1, PIECE_ELEMENTS // self.width)

    def staging_bytes(self) -> int:
        """GPU memory that a piece takes."""
        return sum(_aligned(each[: self.rows_per_piece].nbytes) for each in self.tensors.values())


@dataclass
class Update:
    """An update on its way: whose, how, and what it reads, which must not be freed before."""

    home: Home
    run: UpdatePiece
    gradient: Tensor
    reads: tuple[Tensor, ...] = ()
    on_host: HostWork | None = None
    """The same for a host that updates; None where it cannot."""
    ready: Mark = None
    """When the gradient is there, and the weight has been used for the last time before."""
    returned: Future[Mark] | None = None
    """What the host has made of it."""


@dataclass
class _Slot:
    memory: Tensor
    free: Mark = None

    def views(self, home: Home, rows: slice) -> dict[str, tuple[Tensor, Tensor]]:
        """GPU and host memory of each kind for a piece."""
        found, at = {}, 0
        for kind, tensor in home.tensors.items():
            host = tensor[rows]
            found[kind] = self.memory[at : at + host.nbytes].view(host.dtype).view(host.shape), host
            at += _aligned(host.nbytes)
        return found


class StateLink:
    """The link to the host's states: `submit` updates; the current stream waits for them where it `settle`s a home."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.staging_bytes = device, 0
        self.inbound, self.outbound = SideStream(device), SideStream(device)
        self.updates = SideStream(device, first=True)
        self.slots: list[_Slot] = []
        self.turn = 0
        self.in_flight: deque[Update] = deque()
        self.in_flight_bytes = 0
        self.limited = False
        """Gradients come one by one and may be freed; otherwise all are there when the first update is sent."""
        self.put_off: list[Update] = []
        """In the order of the forward pass."""
        self.host: HostUpdates | None = None
        """Updates what it can instead of the GPU."""

    def adopt(self, home: Home) -> None:
        """Make the ring's slots large enough for its pieces. All homes come before the first update."""
        self.staging_bytes = max(self.staging_bytes, home.staging_bytes())

    def open(self) -> None:
        """Allocate the ring."""
        for _ in range(STATE_SLOTS):
            memory = torch.empty(self.staging_bytes, dtype=torch.uint8, device=self.device)
            self.slots.append(_Slot(claimed(memory, "workspace", "states on their way")))

    def submit(self, update: Update, *, late: bool = False) -> None:
        """Send it on its way, or put it off until `go_on`."""
        update.ready = current_mark(self.device)
        if late or (not self.limited and self.host is None):
            insort(self.put_off, update, key=lambda each: each.home.place)
            return
        self._send(update)
        while self.limited and self.in_flight_bytes > IN_FLIGHT_BYTES and len(self.in_flight) > 1:
            self._wait_for(self.in_flight[0])

    def go_on(self) -> None:
        """Backward is over: what was put off follows, as much as may be on its way."""
        while self.put_off and self.in_flight_bytes < IN_FLIGHT_BYTES:
            self._send(self.put_off.pop(0))

    def hurry(self, home: Home) -> None:
        """Its update sets out now if it was put off, after those that are needed before."""
        while any(each.home is home for each in self.put_off):
            self._send(self.put_off.pop(0))

    def settle(self, home: Home) -> None:
        """The current stream goes on when the weight of `home` is up to date."""
        self.hurry(home)
        for update in [each for each in self.in_flight if each.home is home]:
            self._wait_for(update)
        self.go_on()

    def wait_for_host(self, home: Home) -> None:
        """Until the host has updated what it updates itself of `home`; the current stream need not wait."""
        for update in self.in_flight:
            if update.home is home and update.returned is not None:
                home.updated = update.returned.result()

    def synchronize(self) -> None:
        """Wait, on the host, until the states are all back."""
        while self.put_off:
            self._send(self.put_off.pop(0))
        while self.in_flight:
            self._wait_for(self.in_flight[0])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _wait_for(self, update: Update) -> None:
        """Then its gradient may be freed: whatever takes its memory comes after it in the current stream."""
        self.wait_for_host(update.home)
        current_waits_for(update.home.updated)
        self.in_flight = deque(each for each in self.in_flight if each is not update)
        self.in_flight_bytes -= update.gradient.nbytes

    def _send(self, update: Update) -> None:
        self.in_flight.append(update)
        self.in_flight_bytes += update.gradient.nbytes
        update.home.updates += 1
        if self.host is not None and update.on_host is not None:
            update.returned = self.host.submit(update.on_host)
        else:
            self._send_pieces(update)

    def _send_pieces(self, update: Update) -> None:
        self.updates.wait_for(update.ready)
        home = update.home
        self.inbound.wait_for(home.settled)
        for begin in range(0, home.rows, home.rows_per_piece):
            self._send_piece(update, slice(begin, min(begin + home.rows_per_piece, home.rows)))
        home.updated, home.settled = self.updates.mark(), self.outbound.mark()

    def _send_piece(self, update: Update, rows: slice) -> None:
        slot = self.slots[self.turn % STATE_SLOTS]
        self.turn += 1
        views = slot.views(update.home, rows)
        self.inbound.wait_for(slot.free)
        with self.inbound:
            for staged, host in views.values():
                staged.copy_(host, non_blocking=True)
        self.updates.wait_for(self.inbound.mark())
        with self.updates:
            update.run({kind: staged for kind, (staged, _) in views.items()}, rows)
        self.outbound.wait_for(self.updates.mark())
        with self.outbound:
            for staged, host in views.values():
                host.copy_(staged, non_blocking=True)
        slot.free = self.outbound.mark()


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
