"""Search: the fastest layout and levers that fit, and the best of each other kind.

Every lever costs time and none adds memory, so a layout's time without levers is a lower bound, and its memory with all
of them too. A family of layouts (same degrees) is out when none of its leanest members fits with every lever pulled.
Layouts of the rest are taken by their lower bound; one that fits as it is needs no levers, for others levers are tried
in the order of their cost, skipping those weaker than a set that failed. Layouts fall into kinds (which degrees are
above one, which ZeRO stage); once a kind has a plan, its slower layouts are skipped, and once as many kinds as are told
have one, all that are slower than these.

Plans that leave 5 % of the card are looked for first, as formulas and fragmentation are not known better than that;
then those that just fit. Where nobody said how much memory the host has, offload comes last. The winner is the simplest
of the plans within 2 % of the fastest: the model of time is not better than that.
"""

from dataclasses import dataclass
from typing import Any

from tightfit.errors import UserError
from tightfit.hardware.machine import Machine
from tightfit.jobs.layout import SPLITS, Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.saving import writers_of_node
from tightfit.memory.formulas.training import least_bytes, peaks
from tightfit.plan.cost import Costs, LayoutCost
from tightfit.plan.lever_choices import Group, decides_host, host_group, strongest_of_groups, weaker
from tightfit.plan.space import SearchSpace
from tightfit.plan.steptime import StepTime

COMFORT = 0.95
SAME = 1.02
HOPELESS = 3.0
"""Layouts this many times slower than the best are not looked at: nobody would take them."""
TOLD = 6
"""Kinds of layouts that are told: the fastest, and five others."""
DEFAULT = Levers()
Kind = tuple[int | str, ...]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout with levers, priced: its time and its memory; bytes of the host are one node's."""

    layout: Layout
    levers: Levers
    time: StepTime
    gpu_bytes: int
    host_bytes: int
    """While it trains,"""
    saving_bytes: int = 0
    """and copied there besides to write a checkpoint."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.time.step_s

    def excess_bytes(self, machine: Machine, share: float = 1.0) -> int:
        """Bytes beyond `share` of the card, or beyond the host where that is what is short; a host of unknown size
        holds anything."""
        card = self.gpu_bytes - int(share * machine.accelerator.memory_bytes)
        return card if machine.host_bytes is None else max(card, self.host_peak_bytes - machine.host_bytes)

    @property
    def host_peak_bytes(self) -> int:
        """Of a node, while a checkpoint is written."""
        return self.host_bytes + self.saving_bytes

    def fits(self, machine: Machine, share: float = 1.0) -> bool:
        """Whether card and host hold it."""
        return self.excess_bytes(machine, share) <= 0

    @property
    def complexity(self) -> tuple[int, int, int]:
        """How much there is to get wrong: degrees above one, levers pulled, and the ZeRO stage."""
        layout, levers = self.layout, self.levers
        pulled = sum(getattr(levers, name) != getattr(DEFAULT, name) for name in Levers.model_fields)
        return len(layout.splits) + (layout.tensor_mesh != "1d"), pulled, layout.zero


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


def search(space: SearchSpace, only: list[list[Layout]] | None = None) -> Found:
    """The best plan of each kind, of all families of layouts or of some."""
    space.check()
    pricing = Pricing(space)
    families = pricing.within_budget(list(space.families()) if only is None else only)
    host_is_last = space.machine.host_bytes is None and not decides_host(space.pins.levers)
    for host in (False, True) if host_is_last and space.levers(host=False) else (True,):
        for share in (COMFORT, 1.0):
            one = _Search(pricing, families, share, host=host)
            if plans := one.plans():
                return Found(plans=tuple(plans), nearest=plans[0], layouts=one.layouts)
    return Found(plans=(), nearest=one.nearest(), layouts=one.layouts)


def measured(space: SearchSpace, cost: LayoutCost, levers: Levers) -> Candidate:
    """Memory and time of one choice."""
    needed = peaks(space.workload, cost.layout, levers)
    ranks_here = min(space.machine.per_node, cost.layout.ranks)
    has_host = space.machine.host_bytes != 0  # else all memory is the device's
    return Candidate(
        layout=cost.layout,
        levers=levers,
        time=cost.step(levers),
        gpu_bytes=needed.gpu_bytes,
        host_bytes=needed.host_bytes * ranks_here,
        saving_bytes=writers_of_node(cost.layout, ranks_here) * needed.saved_bytes if has_host else 0,
    )


def cheapest_that_fits(space: SearchSpace, layout: Layout, wanted: Levers, room_bytes: int) -> Candidate | None:
    """The levers that cost least time beside `wanted` and make `layout` fit in `room_bytes`; None where none does."""
    cost = Costs(space.workload, space.machine).of(layout)
    choices = space.levers_of(layout)
    for levers in sorted((_joined(wanted, each) for each in choices), key=lambda each: cost.step(each).step_s):
        tried = measured(space, cost, levers)
        if tried.gpu_bytes <= room_bytes and tried.fits(space.machine):
            return tried
    return None


def _joined(wanted: Levers, more: Levers) -> Levers:
    """`more`, with what of `wanted` the search does not decide."""
    decided = {name: getattr(more, name) for name in more.model_fields_set}
    return Levers(**(wanted.model_dump() | decided))


class Pricing:
    """Costs and candidates of one search, each worked out once."""

    def __init__(self, space: SearchSpace) -> None:
        self.space, self.costs = space, Costs(space.workload, space.machine)
        self._of_layouts: dict[Layout, LayoutCost] = {}
        self._candidates: dict[tuple[Layout, Levers], Candidate] = {}
        self._least_bytes: dict[tuple[Layout, Group, bool], int] = {}

    def within_budget(self, families: list[list[Layout]]) -> list[list[Layout]]:
        """Those of `families` for which a pinned budget of activations is not too small; a sentence where none is."""
        if self.space.pins.levers.get("checkpoint_budget_bytes") is None:
            return families
        kept: list[list[Layout]] = []
        refusal = ""
        for family in families:
            kept.append([])
            for layout in family:
                try:
                    self.candidate(layout, self.space.levers_of(layout)[0])
                    kept[-1].append(layout)
                except UserError as error:
                    refusal = refusal or str(error)
        if not any(kept):
            raise UserError(refusal)
        return kept

    def cost(self, layout: Layout) -> LayoutCost:
        """Of a layout."""
        if layout not in self._of_layouts:
            self._of_layouts[layout] = self.costs.of(layout)
        return self._of_layouts[layout]

    def least_bytes(self, layout: Layout, levers: Levers) -> int:
        """Of the card, without a look at activations: the same for all levers that move as many states."""
        key = (layout, host_group(levers), levers.update_in_backward)
        if key not in self._least_bytes:
            self._least_bytes[key] = least_bytes(self.space.workload, layout, levers)
        return self._least_bytes[key]

    def candidate(self, layout: Layout, levers: Levers) -> Candidate:
        """A layout with levers."""
        key = (layout, levers)
        if key not in self._candidates:
            self._candidates[key] = measured(self.space, self.cost(layout), levers)
        return self._candidates[key]


class _Choices:
    """Sets of levers that a layout can have, and of each group the weakest and the strongest."""

    def __init__(self, levers: list[Levers], *, any_host: bool) -> None:
        self.levers = levers
        self.weakest = dict(reversed(strongest_of_groups(reversed(levers)).items()))
        self.strongest = strongest_of_groups(levers)
        self.telling = levers[-1:] if any_host else list(self.strongest.values())[::-1]
        """If none of these fits, nothing does."""


class _Search:
    """One pass over all layouts with given levers and a given share of the card."""

    def __init__(self, pricing: Pricing, families: list[list[Layout]], share: float, *, host: bool) -> None:
        self.share = share
        self.choices: dict[int, _Choices] = {}
        self.pricing, self.space, self.host = pricing, pricing.space, host
        self.families = [[each for each in family if self._choices(each).levers] for family in families]
        self.feasible: dict[int, bool] = {}
        self.best: dict[Kind, Candidate] = {}
        self.too_large: dict[tuple[Any, ...], int] = {}

    @property
    def layouts(self) -> int:
        """How many there are to look at."""
        return sum(len(family) for family in self.families)

    def plans(self) -> list[Candidate]:
        """The best of each kind, the recommendation first."""
        bounds = [
            (bound_s, number, layout)
            for number, family in enumerate(self.families)
            for layout in family
            if (bound_s := self._bound_s(layout)) is not None
        ]
        for bound_s, number, layout in sorted(bounds, key=lambda bound: bound[0]):
            if bound_s >= self._limit_s():
                break
            if bound_s >= self._limit_s(kind_of(layout)) or not self.feasible.get(number, True):
                continue
            if not self._fits_as_it_is(layout) and self._is_feasible(number):
                self._try(layout)
        return _ranked(list(self.best.values()))

    def nearest(self) -> Candidate:
        """Where nothing fits, what is short of least; of equals, the fastest."""
        best: Candidate | None = None
        for layout in (each for family in self.families for each in self.space.leanest(family)):
            for levers in self._choices(layout).telling:
                least = self.pricing.least_bytes(layout, levers) - self._room_bytes
                if best is None or least <= self._excess(best):
                    tried = self.pricing.candidate(layout, levers)
                    best = min((best or tried, tried), key=lambda each: (self._excess(each), each.step_s))
        assert best is not None
        return best

    def _bound_s(self, layout: Layout) -> float | None:
        """No levers take less than the weakest of the first group whose strongest may fit; None where none may."""
        choices = self._choices(layout)
        may_fit = (group for group in choices.weakest if self._may_fit(layout, choices.strongest[group]))
        first = next(may_fit, None)
        return None if first is None else self._step_s(layout, choices.weakest[first])

    def _limit_s(self, kind: Kind | None = None) -> float:
        """From here on a plan is not told: its kind has one as fast, as many kinds as are told do, or it is hopeless;
        but one that is as good as the fastest may be simpler."""
        if not self.best:
            return float("inf")
        times_s = sorted(each.step_s for each in self.best.values())
        limit_s = HOPELESS * times_s[0]
        if len(times_s) >= TOLD:
            limit_s = min(limit_s, max(times_s[TOLD - 1], SAME * times_s[0]))
        return min(limit_s, self.best[kind].step_s) if kind in self.best else limit_s

    def _fits_as_it_is(self, layout: Layout) -> bool:
        """Keep this layout without levers, where several ranks have no lever that saves time, if it fits."""
        none = self._choices(layout).levers[0]
        if self.space.machine.ranks == 1 or not self._fits(layout, none):
            return False
        self.best[kind_of(layout)] = self.pricing.candidate(layout, none)
        return True

    def _is_feasible(self, number: int) -> bool:
        """Whether one of the leanest members of a family fits with all levers pulled."""
        if number not in self.feasible:
            leanest = self.space.leanest(self.families[number])
            pairs = ((layout, each) for layout in leanest for each in self._choices(layout).telling)
            self.feasible[number] = any(self._fits(layout, levers) for layout, levers in pairs)
        return self.feasible[number]

    def _try(self, layout: Layout) -> None:
        """Keep the cheapest levers of this layout that fit, if that is better than what its kind has."""
        if self._is_too_large(layout):
            return
        kind, choices = kind_of(layout), self._choices(layout)
        limit_s = self._limit_s(kind)
        groups = {group for group in choices.weakest if self._group_may_win(layout, group, limit_s)}
        steps = ((self._step_s(layout, each), each) for each in choices.levers if host_group(each) in groups)
        failed: list[Levers] = []
        for step_s, levers in sorted(steps, key=lambda pair: pair[0]):
            if step_s >= limit_s:
                return
            if any(weaker(levers, other) for other in failed):
                continue
            if self._fits(layout, levers):
                self.best[kind] = self.pricing.candidate(layout, levers)
                return
            failed.append(levers)

    def _group_may_win(self, layout: Layout, group: Group, limit_s: float) -> bool:
        """Whether the weakest of a group is fast enough and the strongest fits."""
        choices = self._choices(layout)
        if self._step_s(layout, choices.weakest[group]) >= limit_s:
            return False
        return self._fits(layout, choices.strongest[group])

    def _choices(self, layout: Layout) -> _Choices:
        """What levers this layout can have."""
        levers = self.space.levers_of(layout, host=self.host)
        if id(levers) not in self.choices:
            self.choices[id(levers)] = _Choices(levers, any_host=self.space.machine.host_bytes is None)
        return self.choices[id(levers)]

    def _is_too_large(self, layout: Layout) -> bool:
        """Whether even the strongest levers do not make this layout fit; larger micro-batches then need no look.

        Those with which a pipeline is not full are looked at each: they keep as many rows in flight as smaller ones.
        """
        full = self.space.fills_pipeline(layout)
        alike = tuple(value for name, value in layout if name != "micro_batch")
        siblings = (*alike, self.space.accumulates(layout))
        if full and layout.micro_batch >= self.too_large.get(siblings, layout.micro_batch + 1):
            return True
        if any(self._fits(layout, each) for each in self._choices(layout).telling):
            return False
        if full:
            self.too_large[siblings] = layout.micro_batch
        return True

    @property
    def _room_bytes(self) -> int:
        return int(self.share * self.space.machine.accelerator.memory_bytes)

    def _step_s(self, layout: Layout, levers: Levers) -> float:
        return self.pricing.cost(layout).step(levers).step_s

    def _may_fit(self, layout: Layout, levers: Levers) -> bool:
        """Whether the card holds what no activations are part of."""
        return self.pricing.least_bytes(layout, levers) <= self._room_bytes

    def _fits(self, layout: Layout, levers: Levers) -> bool:
        if not self._may_fit(layout, levers):
            return False
        return self.pricing.candidate(layout, levers).fits(self.space.machine, self.share)

    def _excess(self, candidate: Candidate) -> int:
        return candidate.excess_bytes(self.space.machine, self.share)


def kind_of(layout: Layout) -> Kind:
    """What is split, and how the data ranks share."""
    return (*(getattr(layout, name) > 1 for name in SPLITS), layout.tensor_mesh, layout.zero)


def _ranked(plans: list[Candidate]) -> list[Candidate]:
    """Fastest first, but the simplest of those that are as good as the fastest before them."""
    if not plans:
        return []
    fastest = min(each.step_s for each in plans)
    same = [each for each in plans if each.step_s <= SAME * fastest]
    winner = min(same, key=lambda each: (each.complexity, each.step_s))
    return [winner, *sorted((each for each in plans if each is not winner), key=lambda each: each.step_s)]
