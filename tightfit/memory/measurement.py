"""Measurement: what a real run had in memory, as the same ledger that predicted it.

On a GPU the caching allocator itself says what it handed out and took back, and when (its history); the tracer, which
runs along, says what each piece was for. Blocks the tracer has never seen belong to kernels: cuBLAS's workspaces and
what operations hold while they run. On the CPU the tracer follows every tensor, and that is all there is.
History and tracer see the whole program from before the model is built; they slow it, so steps are not timed here.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import time_ns
from typing import Any

import torch

from tightfit.memory.allocator import PlainAllocator, rounded
from tightfit.memory.ledger import Ledger, Phase
from tightfit.memory.trace import Allocation, Moment, ledger_of
from tightfit.memory.tracing import Tracer

ALLOCATED, FREED = "alloc", "free_completed"
TAKEN, GIVEN_BACK = "segment_alloc", "segment_free"
HISTORY_ENTRIES = 4_000_000


class Measuring:
    """A tracer over a real run, and its ledger afterwards."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.tracer = device, _TimedTracer()
        self.moments: list[Moment] = []

    def ledger(self) -> Ledger:
        """What was alive at the fullest moment of each phase."""
        if self.device.type != "cuda":
            return ledger_of(self.moments, "measurement", place="host")
        return ledger_of(self.moments, "measurement", context_bytes=context_bytes())


@contextmanager
def measured(device: torch.device) -> Iterator[Measuring]:
    """Everything allocated on `device` inside the block; begin phases and claim tensors through `.tracer`."""
    measuring = Measuring(device)
    if device.type != "cuda":
        with measuring.tracer:
            yield measuring
        measuring.moments = measuring.tracer.trace.replay(PlainAllocator(), steps=1).moments
        return
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(
        enabled="all", context=None, stacks="python", max_entries=HISTORY_ENTRIES, clear_history=True
    )
    try:
        with measuring.tracer:
            yield measuring
        torch.cuda.synchronize()
        history = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        measuring.moments = _moments(history, measuring.tracer)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def context_bytes() -> int:
    """What this process holds on the GPU outside the allocator: the CUDA context, loaded kernels and libraries."""
    free, total = torch.cuda.mem_get_info()
    return max(0, total - free - torch.cuda.memory_reserved())


class _TimedTracer(Tracer):
    """Also notes the address and the time of each allocation, by which the allocator's history knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.births: dict[int, list[tuple[float, int]]] = {}
        self.phase_times: list[tuple[float, Phase]] = [(time_ns() / 1e3, self.phase)]

    def begin(self, phase: Phase) -> None:
        """The program enters `phase`, once the GPU has done what came before."""
        super().begin(phase)
        self.phase_times.append((time_ns() / 1e3, phase))

    def remember(self, number: int, storage: torch.UntypedStorage) -> None:
        """Allocation `number` is this storage."""
        self.births.setdefault(storage.data_ptr(), []).append((time_ns() / 1e3, number))

    def named(self, block: Mapping[str, Any]) -> Allocation:
        """What the block handed out by this event of the history is for."""
        births = self.births.get(block["addr"], [])
        at = bisect_left(births, (block["time_us"], -1))
        made = self.trace.allocations[births[at][1]] if at < len(births) else None
        if made is None or made.bytes != block["size"]:  # a later tensor in the same place is not this one
            return Allocation(rounded(block["size"]), "workspace", "kernels")
        return replace(made, bytes=rounded(made.bytes))


def _moments(history: Sequence[Mapping[str, Any]], tracer: _TimedTracer) -> list[Moment]:
    """The fullest moment of each phase by the allocator's own account."""
    moments: dict[Phase, Moment] = {}
    times = [time for time, _ in tracer.phase_times]
    for at, (event, allocated, reserved) in enumerate(_running_totals(history)):
        phase = tracer.phase_times[max(0, bisect_left(times, event["time_us"]) - 1)][1]
        moment = moments.setdefault(phase, Moment(phase))
        moment.reserved_bytes = max(moment.reserved_bytes, reserved)
        if allocated > moment.allocated_bytes:
            moment.allocated_bytes, moment.event = allocated, at
    for moment in moments.values():
        moment.alive = [tracer.named(block) for block in _alive_after(history, moment.event)]
    return [moment for moment in moments.values() if moment.alive]


def _running_totals(history: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], int, int]]:
    """Each event with what is allocated and reserved after it."""
    allocated = reserved = 0
    for event in history:
        size = event["size"]
        allocated += {ALLOCATED: rounded(size), FREED: -rounded(size)}.get(event["action"], 0)
        reserved += {TAKEN: size, GIVEN_BACK: -size}.get(event["action"], 0)
        yield event, allocated, reserved


def _alive_after(history: Sequence[Mapping[str, Any]], last: int) -> list[Mapping[str, Any]]:
    alive: dict[int, Mapping[str, Any]] = {}
    for event in history[: last + 1]:
        if event["action"] == ALLOCATED:
            alive[event["addr"]] = event
        elif event["action"] == FREED:
            alive.pop(event["addr"], None)
    return list(alive.values())
