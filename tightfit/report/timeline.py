"""Allocated memory over a step, from the CUDA allocator's own trace: every allocation and free, with its time."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import time_ns
from typing import Any

import torch

ALLOCATED, FREED = "alloc", "free_completed"


@dataclass
class Timeline:
    """Milliseconds since the start and bytes allocated at each event; `marks` are the moments a phase began."""

    milliseconds: list[float] = field(default_factory=list)
    allocated_bytes: list[int] = field(default_factory=list)
    marks: dict[str, float] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated at once."""
        return max(self.allocated_bytes, default=0)

    def thinned(self, points: int = 4000) -> "Timeline":
        """The same curve with fewer points; each stretch keeps its highest."""
        size = max(1, len(self.milliseconds) // points)
        starts = range(0, len(self.milliseconds), size)
        best = [
            max(range(i, min(i + size, len(self.milliseconds))), key=self.allocated_bytes.__getitem__) for i in starts
        ]
        return Timeline([self.milliseconds[i] for i in best], [self.allocated_bytes[i] for i in best], self.marks)


class Recorder:
    """Collects the marks of the phases while a step runs."""

    def __init__(self, held_bytes: int) -> None:
        self.held_bytes, self.started_us = held_bytes, time_ns() / 1e3
        self.marks: dict[str, float] = {}
        self.timeline = Timeline()

    def mark(self, phase: str) -> None:
        """Phase `phase` begins now; waits for the GPU, so that phases do not overlap."""
        torch.cuda.synchronize()
        self.marks[phase] = (time_ns() / 1e3 - self.started_us) / 1e3


@contextmanager
def recorded() -> Iterator[Recorder]:
    """Everything the caching allocator hands out or takes back inside the block, as `recorder.timeline` afterwards."""
    torch.cuda.synchronize()
    recorder = Recorder(torch.cuda.memory_allocated())
    torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=2_000_000)
    try:
        yield recorder
        torch.cuda.synchronize()
        trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        recorder.timeline = _replayed(trace, recorder)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _replayed(trace: Sequence[Mapping[str, Any]], recorder: Recorder) -> Timeline:
    timeline, held = Timeline(marks=recorder.marks), recorder.held_bytes
    for event in trace:
        if event["action"] not in (ALLOCATED, FREED):
            continue
        held += event["size"] if event["action"] == ALLOCATED else -event["size"]
        timeline.milliseconds.append((event["time_us"] - recorder.started_us) / 1e3)
        timeline.allocated_bytes.append(held)
    return timeline


def draw_timelines(timelines: Mapping[str, Timeline], title: str, path: Path) -> None:
    """One panel per timeline, on common axes, with the phases marked and the peaks named."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(timelines),
        1,
        figsize=(9, 3 * len(timelines)),
        sharex=True,
        sharey=True,
        squeeze=False,
        constrained_layout=True,
    )
    for axes, (name, full) in zip(panels[:, 0], timelines.items(), strict=True):
        line = full.thinned()
        held = [count / 2**30 for count in line.allocated_bytes]
        axes.fill_between(line.milliseconds, held, step="post", color="#9db8d9")
        axes.step(line.milliseconds, held, where="post", color="#1f5fa8", linewidth=0.8)
        axes.axhline(full.peak_bytes / 2**30, color="#d1495b", linewidth=0.8, linestyle="--")
        axes.set(title=f"{name}: peak {full.peak_bytes / 2**30:.1f} GiB", ylabel="allocated, GiB")
        for phase, moment in full.marks.items():
            axes.axvline(moment, color="#555555", linewidth=0.6, linestyle=":")
            axes.text(
                moment, 1.0, f" {phase}", transform=axes.get_xaxis_transform(), va="top", fontsize=8, color="#333333"
            )
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("milliseconds")
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
