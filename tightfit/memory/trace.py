"""Trace: every allocation and free of a run in order, each with its component; and its replay through an allocator.

Traces come from tracing.py, on real or fake tensors. Replaying one through the model of the caching allocator gives
allocated and reserved memory over time, and the tensors alive at the peak of each phase: summed by component, they are
the ledger. Tensors of memory/host.py are in host memory: they bypass the GPU's allocator and have peaks of their own.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from tightfit.memory.allocator import Allocator, CachingAllocator, PlainAllocator
from tightfit.memory.ledger import Component, Ledger, Line, Phase, Place, Source

CARRIED_STEPS = 6
"""Repetitions in a replay of a step that frees tensors of the step before: the positions of the allocator's blocks
change from step to step. A further segment was needed in the fourth or sixth step (Qwen2.5-1.5B and Llama 1B with
states on the host), and in none of the eight after it that were measured."""
NOTHING_CARRIED: Mapping[int, int] = MappingProxyType({})
CAPTURED = 1 << 20
"""Stream numbers from here on stand for the memory pool of a CUDA graph."""


@dataclass(slots=True)
class Allocation:
    """One allocation: size, component, the module and operation that made it, stream and place."""

    bytes: int
    component: Component
    detail: str = ""
    module: str = ""
    operation: str = ""
    stream: int = 0
    place: Place = "gpu"
    once: bool = False
    """Whether it is made only in the first repetition of a step, and kept."""


@dataclass
class PhasePeak:
    """The peak of a phase: allocated bytes, the allocations alive, and bytes reserved by the phase's end."""

    phase: Phase
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    event: int = 0
    alive: list[Allocation] = field(default_factory=list)


def peak_of_each_phase(moments: Iterable[PhasePeak]) -> list[PhasePeak]:
    """The largest peak of each phase over its occurrences, with the most reserved in any of them."""
    best: dict[Phase, PhasePeak] = {}
    for moment in moments:
        held = best.setdefault(moment.phase, moment)
        fuller = moment if moment.allocated_bytes > held.allocated_bytes else held
        best[moment.phase] = replace(fuller, reserved_bytes=max(held.reserved_bytes, moment.reserved_bytes))
    return list(best.values())


@dataclass
class Replay:
    """Allocated and reserved bytes after each event, the events at which phases start, and the peak of each occurrence.

    `host_occurrences` are the peaks of host memory; empty where nothing is offloaded.
    """

    allocated_bytes: list[int]
    reserved_bytes: list[int]
    starts: list[tuple[int, Phase]]
    occurrences: list[PhasePeak]
    host_occurrences: list[PhasePeak] = field(default_factory=list)

    @property
    def peaks(self) -> list[PhasePeak]:
        """One peak per phase."""
        return peak_of_each_phase(self.occurrences)

    @property
    def host_peaks(self) -> list[PhasePeak]:
        """One peak per phase, of host memory."""
        return peak_of_each_phase(self.host_occurrences)

    @property
    def peak_allocated_bytes(self) -> int:
        """The most that was allocated at once."""
        return max(self.allocated_bytes, default=0)

    @property
    def peak_reserved_bytes(self) -> int:
        """The most that was reserved at once."""
        return max(self.reserved_bytes, default=0)

    @property
    def fullest(self) -> PhasePeak:
        """The run's peak."""
        return max(self.occurrences, key=lambda moment: moment.allocated_bytes)


@dataclass
class Trace:
    """`events` has i where allocation i is made and ~i where it is freed; `starts` has the first event of each phase.

    Events from `step_start` on are one training step, which a replay may repeat. Where a step leaves allocations that
    the next step frees, the step before is traced too, from `previous_start` on.
    """

    allocations: list[Allocation] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    starts: list[tuple[int, Phase]] = field(default_factory=list)
    step_start: int | None = None
    previous_start: int | None = None

    def begin(self, phase: Phase) -> None:
        """Events from here on belong to `phase`."""
        self.starts.append((len(self.events), phase))

    def allocate(self, allocation: Allocation) -> int:
        """Record an allocation; returns its number for `free`."""
        self.allocations.append(allocation)
        self.events.append(len(self.allocations) - 1)
        return len(self.allocations) - 1

    def free(self, number: int) -> None:
        """Record the end of allocation `number`."""
        self.events.append(~number)

    def replay(
        self,
        allocator: Allocator | None = None,
        *,
        steps: int = 2,
        apart: bool = True,
        captured: bool = False,
        update_captured: bool = False,
    ) -> Replay:
        """Replay the events through `allocator`, the step `steps` times; with `apart` host memory counts separately.

        A step that frees allocations of the step before is played `CARRIED_STEPS` times, unless `steps` is 1.

        If `captured` (train/step_graph.py) two steps are played: one eagerly, and one whose forward and backward
        allocate from the CUDA graph's own pool, where gradients stay; with `update_captured` the whole step does.
        """
        player = _Player(self, CachingAllocator() if allocator is None else allocator, apart=apart)
        player.play(0, len(self.events))
        if self.step_start is not None:
            carried = self._carried()
            repeated = 0 if captured or carried is None else steps - 1
            for _ in range(CARRIED_STEPS - 1 if carried and repeated else repeated):
                player.play(self.step_start, len(self.events), carried or {})
            if captured:
                player.capture(self.step_start, len(self.events), whole=update_captured)
        return player.replay()

    def _carried(self) -> dict[int, int] | None:
        """From an allocation of the step before that this step frees to this step's own counterpart, which the next
        repetition frees instead; None where the two steps' allocations differ.

        Left out are those that are freed only after the counterpart is made: the replay frees them at that point.
        """
        if self.previous_start is None or self.step_start is None:
            return {}
        before = [event for event in self.events[self.previous_start : self.step_start] if event >= 0]
        own = [event for event in self.events[self.step_start :] if event >= 0]
        if [self.allocations[n].bytes for n in before] != [self.allocations[n].bytes for n in own]:
            return None
        place = {event: at for at, event in enumerate(self.events[self.step_start :])}
        pairs = zip(before, own, strict=True)
        return {old: new for old, new in pairs if ~old in place and place[~old] < place[new]}


class _Player:
    """Replays ranges of events, and lists the allocations alive at the peaks."""

    def __init__(self, trace: Trace, allocator: Allocator, *, apart: bool) -> None:
        self.trace, self.apart = trace, apart
        self.allocators = {"gpu": allocator, "host": PlainAllocator() if apart else allocator}
        self.blocks: dict[int, Any] = {}
        self.played: list[int] = []
        self.allocated: dict[Place, list[int]] = {"gpu": [], "host": []}
        self.reserved: list[int] = []
        self.starts: list[tuple[int, Phase]] = []
        self.pool = 0
        self.kept: set[int] = set()
        """Allocations that are never freed: those of a CUDA graph that live on after its capture."""

    def replay(self) -> Replay:
        """The replay of everything played."""
        host = self._occurrences("host") if self.apart and any(self.allocated["host"]) else []
        return Replay(self.allocated["gpu"], self.reserved, self.starts, self._occurrences("gpu"), host)

    def play(self, begin: int, end: int, carried: Mapping[int, int] = NOTHING_CARRIED) -> None:
        """Play a range of events; frees of `carried` allocations free their counterparts instead."""
        shift = len(self.played) - begin
        if begin and (inside := [phase for at, phase in self.trace.starts if at <= begin]):
            self.starts.append((len(self.played), inside[-1]))
        self.starts += [(at + shift, phase) for at, phase in self.trace.starts if begin <= at < end]
        for event in self.trace.events[begin:end]:
            self._play(~carried[~event] if ~event in carried else event)

    def capture(self, begin: int, end: int, *, whole: bool) -> None:
        """Empty the cache, then play a step whose allocations before the update, or of the `whole` step, are in the
        graph's pool."""
        for number in [number for number in self.blocks if self.trace.allocations[number].once]:
            self.allocators["gpu"].release(self.blocks.pop(number))
        self.allocators["gpu"].empty_cache()
        after_backward = next(at for at, phase in self.trace.starts if begin <= at and phase == "optimizer")
        update = end if whole else after_backward
        allocated = {event for event in self.trace.events[begin:update] if event >= 0}
        self.pool = CAPTURED
        self.play(begin, update)
        self.pool, self.kept = 0, allocated & self.blocks.keys()
        self.play(update, end)

    def _play(self, event: int) -> None:
        number = max(event, ~event)
        allocation = self.trace.allocations[number]
        allocator = self.allocators[allocation.place]
        stays = number in self.blocks and (allocation.once or number in self.kept)
        survivor = None if stays else self.blocks.pop(number, None)
        if survivor is not None:  # a free, or an allocation left by the last repetition, which is now replaced
            allocator.release(survivor)
        if event >= 0 and not stays:
            self.blocks[event] = allocator.allocate(allocation.bytes, self.pool + allocation.stream)
        self.played.append(number if number in self.kept else event)
        for place, held in self.allocated.items():
            held.append(self.allocators[place].allocated_bytes)
        self.reserved.append(self.allocators["gpu"].reserved_bytes)

    def _occurrences(self, place: Place) -> list[PhasePeak]:
        """The peak in `place` of every occurrence of a phase."""
        moments, allocated = [], self.allocated[place]
        ends = [start for start, _ in self.starts[1:]] + [len(self.played)]
        for (start, phase), end in zip(self.starts, ends, strict=True):
            if start < end:
                at = max(range(start, end), key=allocated.__getitem__)
                held = self.reserved[end - 1] if place == "gpu" else allocated[at]
                moments.append(PhasePeak(phase, allocated[at], held, at))
        self._list_alive(moments, place)
        return moments

    def _list_alive(self, moments: list[PhasePeak], place: Place) -> None:
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
    """The ledger of GPU and host peaks."""
    ledger = ledger_of(replay.peaks, source, context_bytes=context_bytes)
    return ledger.with_lines(ledger_of(replay.host_peaks, source, place="host").lines)


def ledger_of(moments: Iterable[PhasePeak], source: Source, *, context_bytes: int = 0, place: Place = "gpu") -> Ledger:
    """The ledger of phase peaks; bytes added by rounding to blocks are counted on each phase's largest line."""
    return Ledger(source, tuple(line for moment in moments for line in _lines(moment, context_bytes, place)))


def _lines(moment: PhasePeak, context_bytes: int, place: Place) -> Iterator[Line]:
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


def largest_alive(moment: PhasePeak, count: int = 20) -> Sequence[tuple[Allocation, int]]:
    """The largest kinds of tensors alive at `moment`: one of each kind, and their number."""
    kinds: Counter[tuple[int, Component, str, str, str]] = Counter()
    for a in moment.alive:
        kinds[a.bytes, a.component, a.detail, _without_number(a.module), a.operation] += 1
    ranked = sorted(kinds.items(), key=lambda item: -item[0][0] * item[1])[:count]
    return [(Allocation(*kind), times) for kind, times in ranked]


def _without_number(module: str) -> str:
    """`layers.7.mlp` as `layers.*.mlp`, so that the same tensor of many layers is one kind."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))
