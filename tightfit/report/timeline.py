"""Timeline: allocated and reserved memory over a step with its phases, measured or simulated.

A GPU's allocator history has the time of every allocation and free.
Simulations and measurements on the CPU only have their order: there the axis counts allocations and frees.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tightfit.report.figure import panels, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tightfit.memory.measurement import Measuring
    from tightfit.memory.trace import Replay, Trace

Unit = Literal["milliseconds", "allocations and frees"]
MOST_POINTS = 4000
NARROWEST_LABEL = 0.035
"""Share of the axis below which a phase is shaded but not labelled, unless it has no label elsewhere."""
BANDS = {
    "forward": "#e8f1e4",
    "loss": "#fbe6e3",
    "backward": "#e9e6f5",
    "optimizer": "#fdf3d8",
    "evaluation": "#e5f2f5",
}
OTHER_BAND = "#f2f2f2"
ALLOCATED_COLOR, RESERVED_COLOR, PEAK_COLOR = "#1f5fa8", "#777777", "#d1495b"
MEASURED_MARK: dict[str, Any] = {
    "marker": "D",
    "markersize": 7,
    "color": "#e08a00",
    "markeredgecolor": "white",
    "linestyle": "none",
    "zorder": 5,
}


@dataclass
class Timeline:
    """Bytes after each event and the event's position on the axis; `starts` are the positions where phases begin."""

    positions: list[float] = field(default_factory=list)
    allocated_bytes: list[int] = field(default_factory=list)
    reserved_bytes: list[int] = field(default_factory=list)
    starts: list[tuple[float, str]] = field(default_factory=list)
    unit: Unit = "milliseconds"

    @property
    def peak_bytes(self) -> int:
        """The most bytes allocated at once."""
        return max(self.allocated_bytes, default=0)

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes reserved at once."""
        return max(self.reserved_bytes, default=0)

    def phases(self) -> list[tuple[str, float, float]]:
        """(phase, start, end) of each uninterrupted section of a phase."""
        end = self.positions[-1] if self.positions else 0.0
        changes: list[tuple[float, str]] = []
        for start, phase in self.starts:
            if changes and changes[-1][0] == start:
                changes.pop()  # a phase in which nothing happened
            if not changes or changes[-1][1] != phase:
                changes.append((start, phase))
        ended = [*changes, (end, "")]
        return [(phase, start, after) for (start, phase), (after, _) in pairwise(ended) if start < after]

    def thinned(self, points: int = MOST_POINTS) -> "Timeline":
        """The same curve with fewer points: the maximum of each interval."""
        size = max(1, len(self.positions) // points)
        starts = range(0, len(self.positions), size)
        best = [max(range(i, min(i + size, len(self.positions))), key=self.allocated_bytes.__getitem__) for i in starts]
        allocated, reserved = [self.allocated_bytes[i] for i in best], [self.reserved_bytes[i] for i in best]
        return Timeline([self.positions[i] for i in best], allocated, reserved, self.starts, self.unit)


def of_replay(replay: "Replay", part: slice, times_us: Sequence[float] | None = None) -> Timeline:
    """The events `part` of a replay; positions are times if `times_us` is given, else event numbers, both from zero."""
    first, last = part.start, min(part.stop, len(replay.allocated_bytes))
    if times_us is None:
        positions = [float(at) for at in range(last - first)]
    else:
        positions = [(time - times_us[first]) / 1e3 for time in times_us[first:last]]
    return Timeline(
        positions,
        replay.allocated_bytes[first:last],
        replay.reserved_bytes[first:last],
        _starts_within(replay, first, last, positions),
        "allocations and frees" if times_us is None else "milliseconds",
    )


def _starts_within(replay: "Replay", first: int, last: int, positions: Sequence[float]) -> list[tuple[float, str]]:
    """The phase running at `first`, then those that begin before `last`."""
    before = [phase for at, phase in replay.starts if at <= first]
    inside = [(positions[at - first], str(phase)) for at, phase in replay.starts if first < at < last]
    return [*((0.0, str(phase)) for phase in before[-1:]), *inside]


def of_measurement(measuring: "Measuring") -> Timeline:
    """The last step that was measured."""
    return of_replay(measuring.replay, measuring.last_step, measuring.times_us)


def of_simulation(trace: "Trace") -> Timeline:
    """The second step of a simulated run, which starts from the blocks that the first one left in the allocator."""
    replay = trace.replay(steps=2)
    found = of_replay(replay, slice(len(trace.events), len(replay.allocated_bytes)))
    if len(found.starts) > 1 and found.starts[0][1] not in BANDS:  # a step counts its tokens before it says "forward"
        found.starts[:2] = [(0.0, found.starts[1][1])]
    return found


def draw_timelines(
    timelines: Mapping[str, Timeline], title: str, path: Path, *, measured_peaks: Mapping[str, int] | None = None
) -> None:
    """One panel per timeline, on common axes, with phases and peaks labelled; `measured_peaks` are those of a GPU."""
    count = len(timelines)
    with panels(path, count, 1, width=9, height=0.8 + 2.9 * count, sharex=True, sharey=True) as (figure, axes):
        measured = measured_peaks or {}
        highest = max([1, *measured.values(), *(max(t.peak_bytes, t.peak_reserved_bytes) for t in timelines.values())])
        for axis, (name, timeline) in zip(axes[:, 0], timelines.items(), strict=True):
            _draw(axis, name, timeline, highest, measured.get(name))
        axes[-1, 0].set_xlabel(next(iter(timelines.values())).unit)
        figure.suptitle(title)


def _draw(axis: "Axes", name: str, full: Timeline, highest_bytes: int, measured_bytes: int | None) -> None:
    """Draw one panel. `highest_bytes` is that of all panels, which share a scale; a measured peak is marked at the
    position of the curve's peak."""
    scale, unit = (2**30, "GiB") if highest_bytes >= 2**30 else (2**20, "MiB")
    line = full.thinned()
    held = [count / scale for count in line.allocated_bytes]
    axis.fill_between(line.positions, held, step="post", color=ALLOCATED_COLOR, alpha=0.35)
    axis.step(line.positions, held, where="post", color=ALLOCATED_COLOR, linewidth=0.8, label="allocated")
    told = f"peak {full.peak_bytes / scale:,.1f} {unit} allocated"
    if measured_bytes is not None:
        told += f" ({measured_bytes / scale:,.1f} measured)"
        at = full.positions[full.allocated_bytes.index(full.peak_bytes)]
        axis.plot(at, measured_bytes / scale, label="peak measured", **MEASURED_MARK)
    if full.reserved_bytes and full.reserved_bytes != full.allocated_bytes:
        taken = [count / scale for count in line.reserved_bytes]
        axis.step(line.positions, taken, where="post", color=RESERVED_COLOR, linewidth=1.1, label="reserved")
        told += f", {full.peak_reserved_bytes / scale:,.1f} {unit} reserved"
    axis.axhline(full.peak_bytes / scale, color=PEAK_COLOR, linewidth=0.8, linestyle="--", label="peak allocated")
    axis.set_title(f"{name}: {told}" if name else told, fontsize=10)
    axis.set_ylabel(unit)
    axis.set_ylim(bottom=0, top=1.22 * highest_bytes / scale)
    axis.margins(x=0)
    plain(axis)
    _name_phases(axis, full)
    axis.legend(loc="lower right", fontsize=8, framealpha=0.9)


def _name_phases(axis: "Axes", timeline: Timeline) -> None:
    """A band per phase; one too narrow for its label has none if another band of the phase does."""
    stretches = timeline.phases()
    whole = timeline.positions[-1] - timeline.positions[0] if timeline.positions else 0.0
    widest = {phase: max(end - start for name, start, end in stretches if name == phase) for phase, *_ in stretches}
    for phase, start, end in stretches:
        axis.axvspan(start, end, color=BANDS.get(phase, OTHER_BAND), zorder=-1, linewidth=0)
        axis.axvline(start, color="#555555", linewidth=0.6, linestyle=":")
        if end - start >= NARROWEST_LABEL * whole or (end - start == widest[phase] and phase in BANDS):
            narrow = end - start < 1.7 * NARROWEST_LABEL * whole
            axis.text(
                (start + end) / 2,
                0.985,
                phase,
                transform=axis.get_xaxis_transform(),
                ha="center",
                va="top",
                fontsize=8,
                color="#333333",
                rotation=90 if narrow else 0,
            )
