"""Trace: every allocation and free of a run in order, each with what it was for; and its replay through an allocator.

A trace is made by tracing tensors (tracing.py), real or fake. Replaying it through the model of the caching allocator
gives allocated and reserved memory over time, and at the fullest moment of each phase the list of what was alive: that
list, added up by component, is the ledger. What was made by memory/host.py is in host memory: it goes past the GPU's
allocator, and has fullest moments of its own.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tightfit.memory.allocator import Allocator, CachingAllocator, PlainAllocator
from tightfit.memory.ledger import Component, Ledger, Line, Phase, Place, Source


@dataclass(slots=True)
class Allocation:
    """One piece of memory: how large, on which stream, what it is, and which module and operation made it."""

    bytes: int
    component: Component
    detail: str = ""
    module: str = ""
    operation: str = ""
    stream: int = 0
    place: Place = "gpu"


@dataclass
class Moment:
    """The fullest moment of a phase: bytes then, what was alive, and what the allocator held at the phase's end."""

    phase: Phase
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    event: int = 0
    alive: list[Allocation] = field(default_factory=list)


def fullest_of_each_phase(moments: Iterable[Moment]) -> list[Moment]:
    """Of each phase that occurs several times, the fullest occurrence, with all that was ever reserved during it."""
    best: dict[Phase, Moment] = {}
    for moment in moments:
        held = best.setdefault(moment.phase, moment)
        fuller = moment if moment.allocated_bytes > held.allocated_bytes else held
        best[moment.phase] = replace(fuller, reserved_bytes=max(held.reserved_bytes, moment.reserved_bytes))
    return list(best.values())


@dataclass
class Replay:
    """Allocated and reserved bytes after each event, where the phases began, and every phase's fullest moment.

    `host_occurrences` are the fullest moments of host memory; there are none where nothing is kept there.
    """

    allocated_bytes: list[int]
    reserved_bytes: list[int]
    starts: list[tuple[int, Phase]]
    occurrences: list[Moment]
    host_occurrences: list[Moment] = field(default_factory=list)

    @property
    def moments(self) -> list[Moment]:
        """One moment a phase."""
        return fullest_of_each_phase(self.occurrences)

    @property
    def host_moments(self) -> list[Moment]:
        """One moment a phase, of host memory."""
        return fullest_of_each_phase(self.host_occurrences)

    @property
    def peak_allocated_bytes(self) -> int:
        """The most that was allocated at once."""
        return max(self.allocated_bytes, default=0)

    @property
    def peak_reserved_bytes(self) -> int:
        """The most that was reserved at once."""
        return max(self.reserved_bytes, default=0)

    @property
    def fullest(self) -> Moment:
        """The moment of the run's peak."""
        return max(self.occurrences, key=lambda moment: moment.allocated_bytes)


@dataclass
class Trace:
    """`events` holds i where allocation i is made and ~i where it is freed; `starts` says where each phase begins.

    Events from `step_start` on are one training step, which a replay may repeat.
    """

    allocations: list[Allocation] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    starts: list[tuple[int, Phase]] = field(default_factory=list)
    step_start: int | None = None

    def begin(self, phase: Phase) -> None:
        """Events from here on belong to `phase`."""
        self.starts.append((len(self.events), phase))

    def allocate(self, allocation: Allocation) -> int:
        """Record it, and return the number that frees it."""
        self.allocations.append(allocation)
        self.events.append(len(self.allocations) - 1)
        return len(self.allocations) - 1

    def free(self, number: int) -> None:
        """Record the end of allocation `number`."""
        self.events.append(~number)

    def replay(self, allocator: Allocator | None = None, *, steps: int = 2, apart: bool = True) -> Replay:
        """Run the events through `allocator`, the step `steps` times; host memory `apart`, or through the same."""
        player = _Player(self, CachingAllocator() if allocator is None else allocator, apart=apart)
        player.play(0, len(self.events))
        if self.step_start is not None:
            for _ in range(steps - 1):
                player.play(self.step_start, len(self.events))
        return player.replay()


class _Player:
    """Replays events, repeated stretches included, and can say what was alive after any of them."""

    def __init__(self, trace: Trace, allocator: Allocator, *, apart: bool) -> None:
        self.trace, self.apart = trace, apart
        self.allocators = {"gpu": allocator, "host": PlainAllocator() if apart else allocator}
        self.blocks: dict[int, Any] = {}
        self.played: list[int] = []
        self.allocated: dict[Place, list[int]] = {"gpu": [], "host": []}
        self.reserved: list[int] = []
        self.starts: list[tuple[int, Phase]] = []

    def replay(self) -> Replay:
        """What was played."""
        host = self._occurrences("host") if self.apart and any(self.allocated["host"]) else []
        return Replay(self.allocated["gpu"], self.reserved, self.starts, self._occurrences("gpu"), host)

    def play(self, begin: int, end: int) -> None:
        shift = len(self.played) - begin
        if begin and (inside := [phase for at, phase in self.trace.starts if at <= begin]):
            self.starts.append((len(self.played), inside[-1]))
        self.starts += [(at + shift, phase) for at, phase in self.trace.starts if begin <= at < end]
        for event in self.trace.events[begin:end]:
            self._play(event)

    def _play(self, event: int) -> None:
        number = max(event, ~event)
        made = self.trace.allocations[number]
        allocator, survivor = self.allocators[made.place], self.blocks.pop(number, None)
        if survivor is not None:  # freed, or left over from the last repetition and replaced
            allocator.release(survivor)
        if event >= 0:
            self.blocks[event] = allocator.allocate(made.bytes, made.stream)
        self.played.append(event)
        for place, held in self.allocated.items():
            held.append(self.allocators[place].allocated_bytes)
        self.reserved.append(self.allocators["gpu"].reserved_bytes)

    def _occurrences(self, place: Place) -> list[Moment]:
        """The fullest moment in `place` of every stretch that belongs to one phase."""
        moments, allocated = [], self.allocated[place]
        ends = [start for start, _ in self.starts[1:]] + [len(self.played)]
        for (start, phase), end in zip(self.starts, ends, strict=True):
            if start < end:
                at = max(range(start, end), key=allocated.__getitem__)
                held = self.reserved[end - 1] if place == "gpu" else allocated[at]
                moments.append(Moment(phase, allocated[at], held, at))
        self._list_alive(moments, place)
        return moments

    def _list_alive(self, moments: list[Moment], place: Place) -> None:
        wanted, allocations = {moment.event: moment for moment in moments}, self.trace.allocations
        alive: dict[int, None] = {}
        for at, event in enumerate(self.played):
            if event < 0:
                alive.pop(~event, None)
            elif allocations[event].place == place or not self.apart:
                alive[event] = None
            if at in wanted:
                wanted[at].alive = [allocations[number] for number in alive]


def ledger_of_replay(replay: Replay, source: Source, *, context_bytes: int = 0) -> Ledger:
    """Both places' moments as lines."""
    ledger = ledger_of(replay.moments, source, context_bytes=context_bytes)
    return ledger.with_lines(ledger_of(replay.host_moments, source, place="host").lines)


def ledger_of(moments: Iterable[Moment], source: Source, *, context_bytes: int = 0, place: Place = "gpu") -> Ledger:
    """Moments as lines; what rounding to blocks adds belongs to the largest line of its moment."""
    return Ledger(source, tuple(line for moment in moments for line in _lines(moment, context_bytes, place)))


def _lines(moment: Moment, context_bytes: int, place: Place) -> Iterator[Line]:
    held: Counter[tuple[Component, str]] = Counter()
    for allocation in moment.alive:
        held[allocation.component, allocation.detail] += allocation.bytes
    if held:
        largest = max(held, key=lambda key: held[key])
        held[largest] += moment.allocated_bytes - held.total()
    if slack := moment.reserved_bytes - moment.allocated_bytes:
        held["allocator slack", ""] = slack
    if context_bytes:
        held["cuda context", ""] = context_bytes
    for (component, detail), count in held.items():
        yield Line(component=component, detail=detail, phase=moment.phase, bytes=count, place=place)


def largest_alive(moment: Moment, count: int = 20) -> Sequence[tuple[Allocation, int]]:
    """The largest kinds of tensors alive at `moment`: one of each kind and how many of them there were."""
    kinds: Counter[tuple[int, Component, str, str, str]] = Counter()
    for a in moment.alive:
        kinds[a.bytes, a.component, a.detail, _without_number(a.module), a.operation] += 1
    ranked = sorted(kinds.items(), key=lambda item: -item[0][0] * item[1])[:count]
    return [(Allocation(*kind), times) for kind, times in ranked]


def _without_number(module: str) -> str:
    """`layers.7.mlp` as `layers.*.mlp`, so that the same tensor of many layers is one kind."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))
