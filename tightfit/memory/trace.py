"""Trace: every allocation and free of a run in order, each with what it was for; and its replay through an allocator.

A trace is made by tracing tensors (tracing.py), real or fake. Replaying it through the model of the caching allocator
gives allocated and reserved memory over time, and at the fullest moment of each phase the list of what was alive: that
list, added up by component, is the ledger.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tightfit.memory.allocator import Allocator, CachingAllocator
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


@dataclass
class Moment:
    """The fullest moment of a phase: bytes then, what was alive, and what the allocator held at the phase's end."""

    phase: Phase
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    event: int = 0
    alive: list[Allocation] = field(default_factory=list)


@dataclass
class Replay:
    """Allocated and reserved bytes after each event, where the phases began, and each phase's fullest moment."""

    allocated_bytes: list[int]
    reserved_bytes: list[int]
    starts: list[tuple[int, Phase]]
    moments: dict[Phase, Moment]

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
        return max(self.moments.values(), key=lambda moment: moment.allocated_bytes)


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

    def replay(self, allocator: Allocator | None = None, *, steps: int = 2) -> Replay:
        """Run the events through `allocator`, the step `steps` times."""
        player = _Player(self, CachingAllocator() if allocator is None else allocator)
        player.play(0, len(self.events))
        if self.step_start is not None:
            for _ in range(steps - 1):
                player.play(self.step_start, len(self.events))
        return Replay(player.allocated, player.reserved, player.starts, self._moments(player))

    def _moments(self, player: "_Player") -> dict[Phase, Moment]:
        """Of each phase that occurs several times, the fullest occurrence."""
        moments: dict[Phase, Moment] = {}
        ends = [start for start, _ in player.starts[1:]] + [len(player.allocated)]
        for (start, phase), end in zip(player.starts, ends, strict=True):
            if start == end:
                continue
            at = max(range(start, end), key=player.allocated.__getitem__)
            best = moments.setdefault(phase, Moment(phase, event=at))
            best.reserved_bytes = max(best.reserved_bytes, player.reserved[end - 1])
            if player.allocated[at] > best.allocated_bytes:
                best.allocated_bytes, best.event = player.allocated[at], at
        for moment in moments.values():
            moment.alive = player.alive_after(moment.event)
        return moments


class _Player:
    """Replays events, repeated stretches included, and can say what was alive after any of them."""

    def __init__(self, trace: Trace, allocator: Allocator) -> None:
        self.trace, self.allocator = trace, allocator
        self.blocks: dict[int, Any] = {}
        self.played: list[int] = []
        self.allocated: list[int] = []
        self.reserved: list[int] = []
        self.starts: list[tuple[int, Phase]] = []

    def play(self, begin: int, end: int) -> None:
        shift = len(self.played) - begin
        if begin and (inside := [phase for at, phase in self.trace.starts if at <= begin]):
            self.starts.append((len(self.played), inside[-1]))
        self.starts += [(at + shift, phase) for at, phase in self.trace.starts if begin <= at < end]
        for event in self.trace.events[begin:end]:
            self._play(event)

    def _play(self, event: int) -> None:
        allocations, number = self.trace.allocations, max(event, ~event)
        survivor = self.blocks.pop(number, None)
        if survivor is not None:  # freed, or left over from the last repetition and replaced
            self.allocator.release(survivor)
        if event >= 0:
            made = allocations[event]
            self.blocks[event] = self.allocator.allocate(made.bytes, made.stream)
        self.played.append(event)
        self.allocated.append(self.allocator.allocated_bytes)
        self.reserved.append(self.allocator.reserved_bytes)

    def alive_after(self, event: int) -> list[Allocation]:
        alive: dict[int, None] = {}
        for played in self.played[: event + 1]:
            if played >= 0:
                alive[played] = None
            else:
                alive.pop(~played, None)
        return [self.trace.allocations[number] for number in alive]


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
