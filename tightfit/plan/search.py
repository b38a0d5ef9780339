"""Search: the fastest layout and levers that fit, and the best of each other kind.

Every lever costs time and none adds memory, so a layout's time without levers is a lower bound, and its memory with all
of them too. A family of layouts (same degrees) is out when none of its leanest members fits with every lever pulled.
Layouts of the rest are taken by their lower bound; one that fits as it is needs no levers, for others levers are tried
in the order of their cost, skipping those weaker than a set that failed. Layouts fall into kinds (which degrees are
above one, which ZeRO stage); once a kind has a plan, its slower layouts are skipped.

Plans that leave 5 % of the card are looked for first, as formulas and fragmentation are not known better than that;
then those that just fit. Where nobody said how much memory the host has, offload comes last. The winner is the simplest
of the plans within 2 % of the fastest: the model of time is not better than that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.memory.formulas.training import peak
from tightfit.plan.cost import Costs, Frame
from tightfit.plan.space import Space
from tightfit.plan.steptime import StepTime
from tightfit.plan.strength import Group, ceilings, group_of, weaker

COMFORT = 0.95
SAME = 1.02
HOPELESS = 3.0
"""Layouts this many times slower than the best are not looked at: nobody would take them."""
DEFAULT = Levers()
Kind = tuple[bool, bool, bool, bool, int]


@dataclass(frozen=True)
class Candidate:
    """A layout with levers, its time and its memory; `host_bytes` is one node's."""

    layout: Layout
    levers: Levers
    time: StepTime
    gpu_bytes: int
    host_bytes: int

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.time.step_s

    @property
    def complexity(self) -> tuple[int, int, int]:
        """How much there is to get wrong: degrees above one, levers pulled, and the ZeRO stage."""
        layout, levers = self.layout, self.levers
        degrees = sum(degree > 1 for degree in (layout.tensor, layout.pipeline, layout.context, layout.expert))
        pulled = sum(getattr(levers, name) != getattr(DEFAULT, name) for name in Levers.model_fields)
        return degrees, pulled, layout.zero


@dataclass(frozen=True)
class Found:
    """What the search came back with: plans that fit, best first, and the one that is nearest to fitting."""

    plans: tuple[Candidate, ...]
    nearest: Candidate
    layouts: int

    @property
    def best(self) -> Candidate | None:
        """The recommendation."""
        return self.plans[0] if self.plans else None


def search(space: Space) -> Found:
    """The best plan of each kind."""
    space.check()
    costs = Costs(space.workload, space.machine)
    unsure = space.machine.host_bytes is None and "offload" not in space.pins.levers
    for levers in ([space.levers(offload=False)] if unsure else []) + [space.levers()]:
        for share in (COMFORT, 1.0):
            found = _Search(space, costs, levers, share).run()
            if found.plans:
                return found
    return found


class _Choices:
    """Sets of levers, the strongest of each group, and those that show whether anything fits."""

    def __init__(self, levers: list[Levers], any_host: bool) -> None:
        self.levers, self.ceilings = levers, ceilings(levers)
        self.strongest = [levers[-1]] if any_host else list(self.ceilings.values())[::-1]


class _Search:
    """One pass over a space with given levers and a given share of the card."""

    def __init__(self, space: Space, costs: Costs, levers: Sequence[Levers], share: float) -> None:
        self.space, self.costs, self.levers = space, costs, list(levers)
        self.room_bytes = int(share * space.machine.accelerator.memory_bytes)
        self.layouts = 0
        self.nearest: Candidate | None = None
        self.best: dict[Kind, Candidate] = {}
        self.too_large: dict[tuple[int | str, ...], int] = {}
        self.choices: dict[bool, _Choices] = {}

    def run(self) -> Found:
        frames = [self.costs.frame(layout) for layout in self._feasible()]
        for bound_s, frame in sorted(((f.step(self.levers[0]).step_s, f) for f in frames), key=lambda pair: pair[0]):
            if self.best and bound_s > HOPELESS * min(each.step_s for each in self.best.values()):
                break
            self._try(frame, bound_s)
        plans = _ranked(list(self.best.values()))
        nearest = self.nearest or plans[0]
        return Found(tuple(plans), nearest, self.layouts)

    def _feasible(self) -> list[Layout]:
        """The layouts of families whose leanest member fits with all levers pulled."""
        kept: list[Layout] = []
        for family in self.space.families():
            self.layouts += len(family)
            frames = [self.costs.frame(layout) for layout in self.space.leanest(family)]
            best = self._leanest(frames)
            if self._fits(best):
                kept += family
            elif self.nearest is None or self._excess(best) < self._excess(self.nearest):
                self.nearest = best
        return kept

    def _leanest(self, frames: list[Frame]) -> Candidate:
        """The first that fits, else the one nearest to that."""
        found: list[Candidate] = []
        for frame, levers in ((one, each) for one in frames for each in self._choices(one).strongest):
            found.append(self._measure(frame, levers))
            if self._fits(found[-1]):
                return found[-1]
        return min(found, key=self._excess)

    def _try(self, frame: Frame, bound_s: float) -> None:
        """Keep the cheapest levers of this layout that fit, if that is better than what its kind has."""
        kind = kind_of(frame.layout)
        limit = self.best[kind].step_s if kind in self.best else float("inf")
        if bound_s >= limit or self._is_too_large(frame):
            return
        failed: list[Levers] = []
        open_groups: dict[Group, bool] = {}
        costs = ((frame.step(each).step_s, each) for each in self._choices(frame).levers)
        for step_s, levers in sorted(costs, key=lambda pair: pair[0]):
            if step_s >= limit:
                return
            if any(weaker(levers, other) for other in failed) or not self._may_fit(frame, levers, open_groups):
                continue
            candidate = self._measure(frame, levers)
            if self._fits(candidate):
                self.best[kind] = candidate
                return
            failed.append(levers)

    def _choices(self, frame: Frame) -> _Choices:
        """What levers this layout can have."""
        accumulates = self.space.accumulates(frame.layout)
        if accumulates not in self.choices:
            levers = self.space.levers_of(frame.layout, self.levers)
            self.choices[accumulates] = _Choices(levers, self.space.machine.host_bytes is None)
        return self.choices[accumulates]

    def _may_fit(self, frame: Frame, levers: Levers, known: dict[Group, bool]) -> bool:
        """Whether the strongest levers of the same group fit; `known` remembers that of one layout."""
        group = group_of(levers)
        if group not in known:
            known[group] = self._fits(self._measure(frame, self._choices(frame).ceilings[group]))
        return known[group]

    def _is_too_large(self, frame: Frame) -> bool:
        """Whether even the strongest levers do not make this layout fit; larger micro-batches then need no look.

        Those with which a pipeline is not full are looked at each: they keep as many rows in flight as smaller ones.
        """
        layout, full = frame.layout, self.space.fills_pipeline(frame.layout)
        siblings = (
            layout.tensor, layout.pipeline, layout.context, layout.data, layout.expert, layout.zero, layout.schedule,
            layout.stages_per_rank, self.space.accumulates(layout),
        )  # fmt: skip
        if full and layout.micro_batch >= self.too_large.get(siblings, layout.micro_batch + 1):
            return True
        if any(self._fits(self._measure(frame, each)) for each in self._choices(frame).strongest):
            return False
        if full:
            self.too_large[siblings] = layout.micro_batch
        return True

    def _measure(self, frame: Frame, levers: Levers) -> Candidate:
        """Memory and time of one choice."""
        gpu, host = peak(self.space.workload, frame.layout, levers)
        ranks = min(self.space.machine.per_node, frame.layout.ranks)
        return Candidate(frame.layout, levers, frame.step(levers), gpu, host * ranks)

    def _fits(self, candidate: Candidate) -> bool:
        """Whether card and host hold it; a host of unknown size holds anything."""
        return self._excess(candidate) <= 0

    def _excess(self, candidate: Candidate) -> int:
        """Bytes beyond the card, or beyond the host where that is what is short."""
        card, host = candidate.gpu_bytes - self.room_bytes, self.space.machine.host_bytes
        return card if host is None else max(card, candidate.host_bytes - host)


def kind_of(layout: Layout) -> Kind:
    """What is split, and how the data ranks share."""
    return (layout.tensor > 1, layout.pipeline > 1, layout.context > 1, layout.expert > 1, layout.zero)


def _ranked(plans: list[Candidate]) -> list[Candidate]:
    """Fastest first, but the simplest of those that are as good as the fastest before them."""
    if not plans:
        return []
    fastest = min(each.step_s for each in plans)
    same = [each for each in plans if each.step_s <= SAME * fastest]
    winner = min(same, key=lambda each: (each.complexity, each.step_s))
    return [winner, *sorted((each for each in plans if each is not winner), key=lambda each: each.step_s)]
