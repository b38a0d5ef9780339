"""Measurement: what a real run had in memory, as the same ledger that predicted it.

On a GPU the caching allocator itself says what it handed out and took back, and when (its history); the tracer, which
runs along, says what each piece was for. Blocks the tracer has never seen belong to kernels: cuBLAS's workspaces and
what operations hold while they run; host memory that levers keep things in (host.py) is what the tracer saw of it.
On the CPU the tracer follows every tensor, and that is all there is.
Either way the result is a `Replay`: bytes after each event, and what was alive at the fullest moment of each phase.
History and tracer see the whole program from before the model is built; they slow it, so steps are not timed here.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import time_ns

import torch

from tightfit.memory.allocator import PlainAllocator
from tightfit.memory.blocks import ALLOCATED, FREED, GIVEN_BACK, TAKEN, Blocks, Event
from tightfit.memory.ledger import Ledger, Phase
from tightfit.memory.simulation import dtensor_planning_unseen
from tightfit.memory.trace import Allocation, Moment, Replay, fullest_of_each_phase, ledger_of, ledger_of_replay
from tightfit.memory.tracing import Tracer

HISTORY_ENTRIES = 4_000_000


class Measuring:
    """A tracer over a real run; afterwards its replay, its ledger, and where in the replay its last step lies."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.tracer = device, _TimedTracer()
        self.replay = Replay([], [], [], [])
        self.times_us: list[float] | None = None
        """When each event was, where the allocator says so."""
        self.last_step = slice(0, 0)
        self._step: tuple[_Instant, _Instant] | None = None

    @property
    def moments(self) -> list[Moment]:
        """The fullest moment of each phase."""
        return self.replay.moments

    @property
    def fullest(self) -> Moment:
        """The moment of the peak."""
        return max(self.moments, key=lambda moment: moment.allocated_bytes)

    @contextmanager
    def step(self) -> Iterator[None]:
        """What runs inside is one training step, which begins with its forward pass."""
        begin = self.tracer.now()
        self.tracer.begin("forward")
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self._step = begin, self.tracer.now()

    def ledger(self) -> Ledger:
        """What was alive at the fullest moment of each phase."""
        if self.device.type != "cuda":  # where nothing is kept in reserve
            exact = (replace(moment, reserved_bytes=moment.allocated_bytes) for moment in self.moments)
            return ledger_of(exact, "measurement", place="host")
        return ledger_of_replay(self.replay, "measurement", context_bytes=context_bytes())

    def finish(self, history: Sequence[Event] | None = None) -> None:
        """Work out the replay: from the allocator's history where there is one, else from the tracer alone."""
        if history is None:
            self.replay = self.tracer.trace.replay(PlainAllocator(), steps=1, apart=False)
            self.last_step = slice(*(instant.event for instant in self._step)) if self._step else slice(0, 0)
            return
        self.times_us = [event["time_us"] for event in history]
        host = self.tracer.trace.replay(PlainAllocator(), steps=1).host_occurrences
        self.replay = replace(replay_of_history(history, self.tracer), host_occurrences=host)
        if self._step:
            self.last_step = slice(*(bisect_left(self.times_us, instant.time_us) for instant in self._step))


@contextmanager
def measured(device: torch.device) -> Iterator[Measuring]:
    """Everything allocated on `device` inside the block; begin phases and claim tensors through `.tracer`."""
    measuring = Measuring(device)
    if device.type != "cuda":
        with measuring.tracer, dtensor_planning_unseen(measuring.tracer):
            yield measuring
        measuring.finish()
        return
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(
        enabled="all", context=None, stacks="python", max_entries=HISTORY_ENTRIES, clear_history=True
    )
    try:
        with measuring.tracer, dtensor_planning_unseen(measuring.tracer):
            yield measuring
        torch.cuda.synchronize()
        measuring.finish(torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()])
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def context_bytes() -> int:
    """What this process holds on the GPU outside the allocator: the CUDA context, loaded kernels and libraries."""
    free, total = torch.cuda.mem_get_info()
    return max(0, total - free - torch.cuda.memory_reserved())


@dataclass(frozen=True)
class _Instant:
    """A point of the run: by the clock, and as the number of events the tracer had seen."""

    time_us: float
    event: int


class _TimedTracer(Tracer):
    """Also notes the address and the time of each allocation, by which the allocator's history knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.births: dict[int, list[tuple[float, int]]] = {}
        self.phase_times: list[tuple[float, Phase]] = [(time_ns() / 1e3, self.phase)]

    def now(self) -> _Instant:
        """Where the run is."""
        return _Instant(time_ns() / 1e3, len(self.trace.events))

    def begin(self, phase: Phase) -> None:
        """The program enters `phase`; allocations are noted when they are asked for, so the GPU need not wait."""
        super().begin(phase)
        self.phase_times.append((time_ns() / 1e3, phase))

    def remember(self, number: int, storage: torch.UntypedStorage) -> None:
        """Allocation `number` is this storage."""
        self.births.setdefault(storage.data_ptr(), []).append((time_ns() / 1e3, number))

    def named(self, block: Event, size: int) -> Allocation:
        """What the block of `size` bytes that this event of the history handed out is for."""
        births = self.births.get(block["addr"], [])
        at = bisect_left(births, (block["time_us"], -1))
        made = self.trace.allocations[births[at][1]] if at < len(births) else None
        if made is None or made.bytes != block["size"]:  # a later tensor in the same place is not this one
            return Allocation(size, "workspace", "kernels")
        return replace(made, bytes=size)


def replay_of_history(history: Sequence[Event], tracer: _TimedTracer) -> Replay:
    """The allocator's own account of the run; what was alive is listed for the fullest moment of each phase."""
    totals = list(running_totals(history))
    allocated, reserved = [held for held, _ in totals], [taken for _, taken in totals]
    times = [event["time_us"] for event in history]
    starts = [(bisect_left(times, time), phase) for time, phase in tracer.phase_times]
    occurrences = []
    ends = [start for start, _ in starts[1:]] + [len(history)]
    for (start, phase), end in zip(starts, ends, strict=True):
        if start < end:
            at = max(range(start, end), key=allocated.__getitem__)
            occurrences.append(Moment(phase, allocated[at], max(reserved[start:end]), at))
    _list_alive(history, occurrences, tracer)
    return Replay(allocated, reserved, starts, occurrences)


def running_totals(
    history: Sequence[Event], allocated_bytes: int = 0, reserved_bytes: int = 0
) -> Iterator[tuple[int, int]]:
    """What is allocated and reserved after each event, from what was before the first."""
    blocks = Blocks()
    for event in history:
        size = event["size"]
        allocated_bytes += blocks.grown_by(event)
        reserved_bytes += {TAKEN: size, GIVEN_BACK: -size}.get(event["action"], 0)
        yield allocated_bytes, reserved_bytes


def _list_alive(history: Sequence[Event], occurrences: Sequence[Moment], tracer: _TimedTracer) -> None:
    wanted = {moment.event for moment in fullest_of_each_phase(occurrences)}
    found = {moment.event: moment for moment in occurrences if moment.event in wanted}
    alive: dict[int, tuple[Event, int]] = {}
    blocks = Blocks()
    for at, event in enumerate(history):
        grown = blocks.grown_by(event)
        if event["action"] == ALLOCATED:
            alive[event["addr"]] = event, grown
        elif event["action"] == FREED:
            alive.pop(event["addr"], None)
        if at in found:
            found[at].alive = [tracer.named(*block) for block in alive.values()]
