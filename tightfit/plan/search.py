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

from dataclasses import dataclass

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.memory.formulas.training import peak
from tightfit.plan.cost import Costs, LayoutCost
from tightfit.plan.lever_choices import host_group, strongest_of_groups, weaker
from tightfit.plan.space import SearchSpace
from tightfit.plan.steptime import StepTime

COMFORT = 0.95
SAME = 1.02
HOPELESS = 3.0
"""Layouts this many times slower than the best are not looked at: nobody would take them."""
DEFAULT = Levers()
Kind = tuple[bool, bool, bool, bool, int]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout with levers, priced: its time and its memory; `host_bytes` is one node's."""

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


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the search came back with: plans that fit, best first, and the one that is nearest to fitting."""

    plans: tuple[Candidate, ...]
    nearest: Candidate
    layouts: int

    @property
    def best(self) -> Candidate | None:
        """The recommendation."""
        return self.plans[0] if self.plans else None


def search(space: SearchSpace) -> Found:
    """The best plan of each kind."""
    space.check()
    pricing = _Pricing(space)
    families = list(space.families())
    host_is_last = space.machine.host_bytes is None and "offload" not in space.pins.levers
    for levers in ([space.levers(host=False)] if host_is_last else []) + [space.levers()]:
        for share in (COMFORT, 1.0):
            found = _Search(pricing, families, levers, share).run()
            if found.plans:
                return found
    return found


def measured(space: SearchSpace, cost: LayoutCost, levers: Levers) -> Candidate:
    """Memory and time of one choice."""
    gpu_bytes, rank_host_bytes = peak(space.workload, cost.layout, levers)
    ranks_on_host = min(space.machine.per_node, cost.layout.ranks)
    return Candidate(
        layout=cost.layout,
        levers=levers,
        time=cost.step(levers),
        gpu_bytes=gpu_bytes,
        host_bytes=rank_host_bytes * ranks_on_host,
    )


def cheapest_that_fits(space: SearchSpace, layout: Layout, wanted: Levers, room_bytes: int) -> Candidate | None:
    """The levers that cost least time beside `wanted` and make `layout` fit in `room_bytes`; None where none does."""
    cost = Costs(space.workload, space.machine).of(layout)
    choices = space.levers_of(layout, space.levers())
    for levers in sorted((_joined(wanted, each) for each in choices), key=lambda each: cost.step(each).step_s):
        tried = measured(space, cost, levers)
        host_room = space.machine.host_bytes
        if tried.gpu_bytes <= room_bytes and (host_room is None or tried.host_bytes <= host_room):
            return tried
    return None


def _joined(wanted: Levers, more: Levers) -> Levers:
    """`more`, with what of `wanted` the search does not decide."""
    decided = {name: getattr(more, name) for name in more.model_fields_set}
    return Levers(**(wanted.model_dump() | decided))


class _Pricing:
    """Costs and candidates of one search, each worked out once."""

    def __init__(self, space: SearchSpace) -> None:
        self.space, self.costs = space, Costs(space.workload, space.machine)
        self._of_layouts: dict[Layout, LayoutCost] = {}
        self._candidates: dict[tuple[Layout, Levers], Candidate] = {}

    def cost(self, layout: Layout) -> LayoutCost:
        """Of a layout."""
        if layout not in self._of_layouts:
            self._of_layouts[layout] = self.costs.of(layout)
        return self._of_layouts[layout]

    def candidate(self, layout: Layout, levers: Levers) -> Candidate:
        """A layout with levers."""
        key = (layout, levers)
        if key not in self._candidates:
            self._candidates[key] = measured(self.space, self.cost(layout), levers)
        return self._candidates[key]


class _Choices:
    """Sets of levers, the strongest of each group, and those that show whether anything fits."""

    def __init__(self, levers: list[Levers], *, any_host: bool) -> None:
        self.levers, self.of_groups = levers, strongest_of_groups(levers)
        self.strongest = [levers[-1]] if any_host else list(self.of_groups.values())[::-1]


class _Search:
    """One pass over all layouts with given levers and a given share of the card."""

    def __init__(self, pricing: _Pricing, families: list[list[Layout]], levers: list[Levers], share: float) -> None:
        self.pricing, self.space, self.families, self.levers = pricing, pricing.space, families, levers
        self.room_bytes = int(share * self.space.machine.accelerator.memory_bytes)
        self.nearest: Candidate | None = None
        self.best: dict[Kind, Candidate] = {}
        self.too_large: dict[tuple[int | str, ...], int] = {}
        self.choices: dict[bool, _Choices] = {}

    def run(self) -> Found:
        bounds = [(self._bound_s(layout), layout) for layout in self._feasible()]
        for bound_s, layout in sorted(bounds, key=lambda pair: pair[0]):
            if self.best and bound_s > HOPELESS * min(each.step_s for each in self.best.values()):
                break
            self._try(layout, bound_s)
        plans = _ranked(list(self.best.values()))
        layouts = sum(len(family) for family in self.families)
        return Found(plans=tuple(plans), nearest=self.nearest or plans[0], layouts=layouts)

    def _bound_s(self, layout: Layout) -> float:
        """No levers take less."""
        return self.pricing.cost(layout).step(self.levers[0]).step_s

    def _feasible(self) -> list[Layout]:
        """The layouts of families whose leanest member fits with all levers pulled."""
        kept: list[Layout] = []
        for family in self.families:
            best = self._leanest(self.space.leanest(family))
            if self._fits(best):
                kept += family
            elif self.nearest is None or self._excess(best) < self._excess(self.nearest):
                self.nearest = best
        return kept

    def _leanest(self, layouts: list[Layout]) -> Candidate:
        """The first that fits, else the one nearest to that."""
        found: list[Candidate] = []
        for layout, levers in ((one, each) for one in layouts for each in self._choices(one).strongest):
            found.append(self.pricing.candidate(layout, levers))
            if self._fits(found[-1]):
                return found[-1]
        return min(found, key=self._excess)

    def _try(self, layout: Layout, bound_s: float) -> None:
        """Keep the cheapest levers of this layout that fit, if that is better than what its kind has."""
        kind = kind_of(layout)
        limit_s = self.best[kind].step_s if kind in self.best else float("inf")
        if bound_s >= limit_s or self._is_too_large(layout):
            return
        failed: list[Levers] = []
        cost, choices = self.pricing.cost(layout), self._choices(layout)
        steps = ((cost.step(each).step_s, each) for each in choices.levers)
        for step_s, levers in sorted(steps, key=lambda pair: pair[0]):
            if step_s >= limit_s:
                return
            strongest = self.pricing.candidate(layout, choices.of_groups[host_group(levers)])
            if any(weaker(levers, other) for other in failed) or not self._fits(strongest):
                continue
            candidate = self.pricing.candidate(layout, levers)
            if self._fits(candidate):
                self.best[kind] = candidate
                return
            failed.append(levers)

    def _choices(self, layout: Layout) -> _Choices:
        """What levers this layout can have."""
        accumulates = self.space.accumulates(layout)
        if accumulates not in self.choices:
            levers = self.space.levers_of(layout, self.levers)
            self.choices[accumulates] = _Choices(levers, any_host=self.space.machine.host_bytes is None)
        return self.choices[accumulates]

    def _is_too_large(self, layout: Layout) -> bool:
        """Whether even the strongest levers do not make this layout fit; larger micro-batches then need no look.

        Those with which a pipeline is not full are looked at each: they keep as many rows in flight as smaller ones.
        """
        full = self.space.fills_pipeline(layout)
        degrees = (layout.tensor, layout.pipeline, layout.context, layout.data, layout.expert, layout.zero)
        siblings = (*degrees, layout.schedule, layout.stages_per_rank, self.space.accumulates(layout))
        if full and layout.micro_batch >= self.too_large.get(siblings, layout.micro_batch + 1):
            return True
        if any(self._fits(self.pricing.candidate(layout, each)) for each in self._choices(layout).strongest):
            return False
        if full:
            self.too_large[siblings] = layout.micro_batch
        return True

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
