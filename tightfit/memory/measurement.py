"""Measurement: the ledger of a real run.

On a GPU the caching allocator's history has every allocation and free with its time; the tracer, which runs alongside,
gives each block its component. Blocks that the tracer has not seen belong to kernels: cuBLAS's workspaces and temporary
memory of operations. Host memory of levers (host.py) comes from the tracer, and on the CPU everything does. Either way
the result is a `Replay`: bytes after each event, and the tensors alive at the peak of each phase. History and tracer
run from before the model is built; they slow the program, so steps are not timed here.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import time_ns
from typing import Any

import torch

from tightfit.memory.allocator import PlainAllocator
from tightfit.memory.blocks import ALLOCATED, FREED, GIVEN_BACK, TAKEN, Event, HistoryBlocks
from tightfit.memory.ledger import Ledger, Phase
from tightfit.memory.simulation import dtensor_planning_unseen
from tightfit.memory.trace import Allocation, PhasePeak, Replay, ledger_of, ledger_of_replay, peak_of_each_phase
from tightfit.memory.tracing import Tracer

HISTORY_ENTRIES = 4_000_000


class Measuring:
    """A tracer over a real run; afterwards its replay, its ledger, and the last step's range of events."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.tracer = device, _TimedTracer()
        self.replay = Replay([], [], [], [])
        self.times_us: list[float] | None = None
        """Times of the events in the allocator's history; None on the CPU."""
        self.last_step = slice(0, 0)
        self._step: tuple[_Instant, _Instant] | None = None

    @property
    def peaks(self) -> list[PhasePeak]:
        """The fullest moment of each phase."""
        return self.replay.peaks

    @property
    def fullest(self) -> PhasePeak:
        """The moment of the peak."""
        return max(self.peaks, key=lambda moment: moment.allocated_bytes)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one training step, which begins with its forward pass."""
        begin = self.tracer.now()
        self.tracer.begin("forward")
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self._step = begin, self.tracer.now()

    def ledger(self) -> Ledger:
        """The measured ledger: bytes by component at the peak of each phase."""
        if self.device.type != "cuda":  # the CPU's allocator reserves nothing
            exact = (replace(moment, reserved_bytes=moment.allocated_bytes) for moment in self.peaks)
            return ledger_of(exact, "measurement", place="host")
        return ledger_of_replay(self.replay, "measurement", context_bytes=context_bytes())

    def finish(self, history: Sequence[Event] | None = None, before: Sequence[Mapping[str, Any]] = ()) -> None:
        """Compute the replay: from the allocator's history if given, else from the tracer alone.

        `before` are the allocator's segments when the history began.
        """
        if history is None:
            self.replay = self.tracer.trace.replay(PlainAllocator(), steps=1, apart=False)
            self.last_step = slice(*(instant.event for instant in self._step)) if self._step else slice(0, 0)
            return
        self.times_us = [event["time_us"] for event in history]
        host = self.tracer.trace.replay(PlainAllocator(), steps=1).host_occurrences
        self.replay = replace(replay_of_history(history, self.tracer, before), host_occurrences=host)
        if self._step:
            self.last_step = slice(*(bisect_left(self.times_us, instant.time_us) for instant in self._step))


@contextmanager
def measured(device: torch.device) -> Iterator[Measuring]:
    """Measure everything allocated on `device` inside the block; begin phases and claim tensors through `.tracer`."""
    measuring = Measuring(device)
    if device.type != "cuda":
        with measuring.tracer, dtensor_planning_unseen(measuring.tracer):
            yield measuring
        measuring.finish()
        return
    torch.cuda.synchronize()
    here = torch.cuda.current_device()
    before = [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == here]
    torch.cuda.memory._record_memory_history(
        enabled="all", context=None, stacks="python", max_entries=HISTORY_ENTRIES, clear_history=True
    )
    try:
        with measuring.tracer, dtensor_planning_unseen(measuring.tracer):
            yield measuring
        torch.cuda.synchronize()
        measuring.finish(torch.cuda.memory._snapshot()["device_traces"][here], before)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def context_bytes() -> int:
    """GPU memory of this process outside the allocator: the CUDA context, loaded kernels and libraries."""
    free, total = torch.cuda.mem_get_info()
    return max(0, total - free - torch.cuda.memory_reserved())


@dataclass(frozen=True)
class _Instant:
    """A point of the run: time, and number of events traced so far."""

    time_us: float
    event: int


class _TimedTracer(Tracer):
    """Also records address and time of each allocation, to find it in the allocator's history."""

    def __init__(self) -> None:
        super().__init__()
        self.births: dict[int, list[tuple[float, int]]] = {}
        self.phase_times: list[tuple[float, Phase]] = [(time_ns() / 1e3, self.phase)]

    def now(self) -> _Instant:
        """The current time and number of events."""
        return _Instant(time_ns() / 1e3, len(self.trace.events))

    def begin(self, phase: Phase) -> None:
        """The program enters `phase`; the history has the host's time of allocations, so the GPU need not be waited
        for."""
        super().begin(phase)
        self.phase_times.append((time_ns() / 1e3, phase))

    def remember(self, number: int, storage: torch.UntypedStorage) -> None:
        """Record when and at which address allocation `number` was made."""
        self.births.setdefault(storage.data_ptr(), []).append((time_ns() / 1e3, number))

    def named(self, block: Event, size: int) -> Allocation:
        """The traced allocation of a block of `size` bytes in the history; a kernel's workspace if there is none."""
        births = self.births.get(block["addr"], [])
        at = bisect_left(births, (block["time_us"], -1))
        allocation = self.trace.allocations[births[at][1]] if at < len(births) else None
        if allocation is None or allocation.bytes != block["size"]:  # a later tensor in the same place is not this one
            return Allocation(size, "workspace", "kernels")
        return replace(allocation, bytes=size)


def replay_of_history(
    history: Sequence[Event], tracer: _TimedTracer, before: Sequence[Mapping[str, Any]] = ()
) -> Replay:
    """The replay of the allocator's history, with the tensors alive at the peak of each phase."""
    totals = list(running_totals(history, before=before))
    allocated, reserved = [held for held, _ in totals], [taken for _, taken in totals]
    times = [event["time_us"] for event in history]
    starts = [(bisect_left(times, time), phase) for time, phase in tracer.phase_times]
    occurrences = []
    ends = [start for start, _ in starts[1:]] + [len(history)]
    for (start, phase), end in zip(starts, ends, strict=True):
        if start < end:
            at = max(range(start, end), key=allocated.__getitem__)
            occurrences.append(PhasePeak(phase, allocated[at], max(reserved[start:end]), at))
    _list_alive(history, occurrences, tracer, before)
    return Replay(allocated, reserved, starts, occurrences)


def running_totals(
    history: Sequence[Event],
    allocated_bytes: int = 0,
    reserved_bytes: int = 0,
    *,
    before: Sequence[Mapping[str, Any]] = (),
) -> Iterator[tuple[int, int]]:
    """(allocated, reserved) bytes after each event, beginning with those given for before the first."""
    blocks = HistoryBlocks(before)
    for event in history:
        size = event["size"]
        allocated_bytes += blocks.grown_by(event)
        reserved_bytes += {TAKEN: size, GIVEN_BACK: -size}.get(event["action"], 0)
        yield allocated_bytes, reserved_bytes


def _list_alive(
    history: Sequence[Event],
    occurrences: Sequence[PhasePeak],
    tracer: _TimedTracer,
    before: Sequence[Mapping[str, Any]],
) -> None:
    wanted = {moment.event for moment in peak_of_each_phase(occurrences)}
    found = {moment.event: moment for moment in occurrences if moment.event in wanted}
    alive: dict[int, tuple[Event, int]] = {}
    blocks = HistoryBlocks(before)
    for at, event in enumerate(history):
        grown = blocks.grown_by(event)
        if event["action"] == ALLOCATED:
            alive[event["addr"]] = event, grown
        elif event["action"] == FREED:
            alive.pop(event["addr"], None)
        if at in found:
            found[at].alive = [tracer.named(*block) for block in alive.values()]
