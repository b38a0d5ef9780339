"""A block of code on a GPU as a timeline: every allocation and free of the caching allocator, with phases marked."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import time_ns

import torch

from tightfit.memory.blocks import Event
from tightfit.memory.measurement import running_totals
from tightfit.report.timeline import Timeline


class Recorder:
    """Collects where phases begin while a step runs."""

    def __init__(self, allocated_bytes: int, reserved_bytes: int) -> None:
        self.allocated_bytes, self.reserved_bytes, self.started_us = allocated_bytes, reserved_bytes, time_ns() / 1e3
        self.starts: list[tuple[float, str]] = []
        self.timeline = Timeline()

    def mark(self, phase: str) -> None:
        """Phase `phase` begins now; waits for the GPU, so that phases do not overlap."""
        torch.cuda.synchronize()
        self.starts.append(((time_ns() / 1e3 - self.started_us) / 1e3, phase))


@contextmanager
def recorded() -> Iterator[Recorder]:
    """Records all allocations and frees of the caching allocator inside the block, as `recorder.timeline`."""
    torch.cuda.synchronize()
    recorder = Recorder(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=2_000_000)
    try:
        yield recorder
        torch.cuda.synchronize()
        history = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        recorder.timeline = of_history(history, recorder)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def of_history(history: Sequence[Event], recorder: Recorder) -> Timeline:
    """The timeline of an allocator history, starting from the bytes at the start of recording."""
    totals = list(running_totals(history, recorder.allocated_bytes, recorder.reserved_bytes))
    positions = [(event["time_us"] - recorder.started_us) / 1e3 for event in history]
    return Timeline(positions, [held for held, _ in totals], [taken for _, taken in totals], recorder.starts)
