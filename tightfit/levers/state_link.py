"""Optimizer states in host memory, copied to the GPU a piece at a time, updated there and copied back.

Twelve bytes a weight travel in each direction at once (float32 master and two moments). The GPU does the arithmetic, so
results are bit for bit those of states that stay on the GPU, and the host's cores stay free. (Where the host is faster
than its link, it can update float32 states itself: host_update.py.) Copies in, updates and copies out have a stream
each and share a ring of GPU staging buffers:

    in      piece 3  piece 4 …         waits for a free buffer
    update     piece 2  piece 3 …      waits for the copy in, and for the gradient
    out           piece 1  piece 2 …   frees the buffer

The host never blocks. The compute stream waits for an update where the weight is used next, in the following forward
pass, or earlier where more than `IN_FLIGHT_BYTES` of gradients would wait for the link.

Backward produces the last layers' gradients first, and forward uses their weights last. So the updates of the last
layers (without updates inside backward: of all layers) are deferred until backward is over, and the link stays busy
through the next forward pass. Deferred updates are sent in forward order. With updates inside backward the few deferred
ones are all sent right after backward, while the link is busy with the embedding, which forward needs first. Those of a
whole model are sent a little ahead of need: queueing all their pieces at once would take the host longer than a layer
takes the GPU, which would idle.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tightfit.levers.host_update import HostUpdates, HostWork
from tightfit.levers.policy.offload import IN_FLIGHT_BYTES, PIECE_ELEMENTS, STATE_SLOTS
from tightfit.levers.side_stream import SideStream, StreamEvent, current_stream_waits_for, record_current_stream
from tightfit.memory.host import claimed

ALIGNMENT = 256

UpdatePiece = Callable[[dict[str, Tensor], slice], None]
"""Updates some rows of a matrix, given the staged rows of its host tensors by kind."""


@dataclass
class OffloadedMatrix:
    """One matrix whose states are in host memory, one row of each state per row of the matrix."""

    rows: int
    width: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Host tensors by kind: moments, and the master or an offloaded weight."""
    weight_offloaded: bool = False
    """Whether the weight is on the host as well (weight_streaming.py)."""
    forward_index: int = 0
    """Position of its module in the forward pass."""
    update_count: int = 0
    """Updates sent so far."""
    weight_ready: StreamEvent = None
    """The event after which the weight on the GPU is up to date."""
    states_ready: StreamEvent = None
    """The event after which the states on the host are up to date."""

    def add(self, kind: str, tensor: Tensor) -> None:
        """Register a host tensor."""
        self.tensors[kind] = tensor.view(self.rows, -1)

    @property
    def rows_per_piece(self) -> int:
        """Rows updated at a time."""
        return max(1, PIECE_ELEMENTS // self.width)

    def staging_bytes(self) -> int:
        """Bytes of one piece in a staging buffer."""
        return sum(_aligned(tensor[: self.rows_per_piece].nbytes) for tensor in self.tensors.values())


@dataclass
class Update:
    """One update of one matrix; `run` keeps the tensors it reads alive until the update is done."""

    matrix: OffloadedMatrix
    run: UpdatePiece
    gradient: Tensor
    on_host: HostWork | None = None
    """The same update for the host's cores; None where they cannot make it."""
    gradient_ready: StreamEvent = None
    """The event after which the gradient is complete and backward no longer uses the weight."""
    after: Callable[[], None] | None = None
    """Called after the compute stream waits for the update."""
    host_result: Future[StreamEvent] | None = None
    """Of an update on the host: the event after which the new weight is on the GPU."""


@dataclass
class _StagingBuffer:
    memory: Tensor
    free: StreamEvent = None
    staged: dict[tuple[Any, ...], dict[str, Tensor]] = field(default_factory=dict)
    """Views by the shapes of a piece: nearly all pieces have equal shapes, and a view costs the host microseconds."""

    def views(self, matrix: OffloadedMatrix, rows: slice) -> dict[str, tuple[Tensor, Tensor]]:
        """(staged, host) views of every kind for a piece."""
        hosts = {kind: tensor[rows] for kind, tensor in matrix.tensors.items()}
        shapes = tuple((kind, host.dtype, host.shape) for kind, host in hosts.items())
        if shapes not in self.staged:
            self.staged[shapes] = self._staged(hosts)
        staged = self.staged[shapes]
        return {kind: (staged[kind], host) for kind, host in hosts.items()}

    def _staged(self, hosts: dict[str, Tensor]) -> dict[str, Tensor]:
        found, offset = {}, 0
        for kind, host in hosts.items():
            found[kind] = self.memory[offset : offset + host.nbytes].view(host.dtype).view(host.shape)
            offset += _aligned(host.nbytes)
        return found


class StateLink:
    """Queues updates of offloaded matrices; `wait_until_updated` makes the compute stream wait for that of one."""

    def __init__(self, device: torch.device, *, frees_gradients: bool) -> None:
        """`frees_gradients`: gradients come one by one during backward and are freed once their update is done."""
        self.device, self.frees_gradients, self.staging_bytes = device, frees_gradients, 0
        self.inbound, self.outbound = SideStream(device), SideStream(device)
        self.updates = SideStream(device, high_priority=True)
        self.ring: list[_StagingBuffer] = []
        self.pieces_sent = 0
        self.in_flight: deque[Update] = deque()
        self.in_flight_bytes = 0
        self.deferred: list[Update] = []
        """Deferred updates, in forward order."""
        self.host: HostUpdates | None = None
        """Makes those updates on the host's cores that it can; None leaves all to the GPU."""

    def reserve(self, matrix: OffloadedMatrix) -> None:
        """Make staging buffers large enough for the matrix's pieces; called for all matrices before `allocate`."""
        self.staging_bytes = max(self.staging_bytes, matrix.staging_bytes())

    def allocate(self) -> None:
        """Allocate the ring."""
        for _ in range(STATE_SLOTS):
            memory = torch.empty(self.staging_bytes, dtype=torch.uint8, device=self.device)
            self.ring.append(_StagingBuffer(claimed(memory, "workspace", "states on their way")))

    def submit(self, update: Update, *, deferred: bool = False) -> None:
        """Send an update, or keep it until `flush_deferred`."""
        update.gradient_ready = record_current_stream(self.device)
        if deferred or (not self.frees_gradients and self.host is None):
            insort(self.deferred, update, key=lambda each: each.matrix.forward_index)
            return
        self._send(update)
        while self.frees_gradients and self.in_flight_bytes > IN_FLIGHT_BYTES and len(self.in_flight) > 1:
            self._finish(self.in_flight[0])

    def flush_deferred(self) -> None:
        """Send deferred updates after backward: all, or without updates inside backward up to IN_FLIGHT_BYTES."""
        while self.deferred and (self.frees_gradients or self.in_flight_bytes < IN_FLIGHT_BYTES):
            self._send(self.deferred.pop(0))

    def prioritise(self, matrix: OffloadedMatrix) -> None:
        """Send a matrix's update now if it is deferred, after the deferred ones that forward needs before it."""
        while any(update.matrix is matrix for update in self.deferred):
            self._send(self.deferred.pop(0))

    def wait_until_updated(self, matrix: OffloadedMatrix) -> None:
        """Make the compute stream wait until the matrix's weight is up to date."""
        self.prioritise(matrix)
        for update in [each for each in self.in_flight if each.matrix is matrix]:
            self._finish(update)
        self.flush_deferred()

    def wait_for_host(self, matrix: OffloadedMatrix) -> None:
        """Block until the host's cores have updated a matrix; needs no waiting of streams."""
        for update in self.in_flight:
            if update.matrix is matrix and update.host_result is not None:
                matrix.weight_ready = update.host_result.result()

    def synchronize(self) -> None:
        """Block until all states on the host are up to date."""
        while self.deferred:
            self._send(self.deferred.pop(0))
        while self.in_flight:
            self._finish(self.in_flight[0])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _finish(self, update: Update) -> None:
        """Make the compute stream wait for an update. Its gradient may then be freed: work that reuses its memory is
        queued later on the same stream."""
        self.wait_for_host(update.matrix)
        current_stream_waits_for(update.matrix.weight_ready)
        if update.after is not None:
            update.after()
        self.in_flight = deque(each for each in self.in_flight if each is not update)
        self.in_flight_bytes -= update.gradient.nbytes

    def _send(self, update: Update) -> None:
        self.in_flight.append(update)
        self.in_flight_bytes += update.gradient.nbytes
        update.matrix.update_count += 1
        if self.host is not None and update.on_host is not None:
            update.host_result = self.host.submit(update.on_host)
        else:
            self._send_pieces(update)

    def _send_pieces(self, update: Update) -> None:
        self.updates.wait_for(update.gradient_ready)
        matrix = update.matrix
        self.inbound.wait_for(matrix.states_ready)
        for begin in range(0, matrix.rows, matrix.rows_per_piece):
            self._send_piece(update, slice(begin, min(begin + matrix.rows_per_piece, matrix.rows)))
        matrix.weight_ready, matrix.states_ready = self.updates.record_event(), self.outbound.record_event()

    def _send_piece(self, update: Update, rows: slice) -> None:
        buffer = self.ring[self.pieces_sent % STATE_SLOTS]
        self.pieces_sent += 1
        views = buffer.views(update.matrix, rows)
        self.inbound.wait_for(buffer.free)
        with self.inbound:
            for staged, host in views.values():
                staged.copy_(host, non_blocking=True)
        self.updates.wait_for(self.inbound.record_event())
        with self.updates:
            update.run({kind: staged for kind, (staged, _) in views.items()}, rows)
        self.outbound.wait_for(self.updates.record_event())
        with self.outbound:
            for staged, host in views.values():
                host.copy_(staged, non_blocking=True)
        buffer.free = self.outbound.record_event()


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
