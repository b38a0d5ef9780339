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

from tightfit.errors import UserError
from tightfit.hardware.machine import Machine
from tightfit.jobs.layout import SPLITS, Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.saving import writers_of_node
from tightfit.memory.formulas.training import peaks
from tightfit.plan.cost import Costs, LayoutCost
from tightfit.plan.lever_choices import host_group, strongest_of_groups, weaker
from tightfit.plan.space import SearchSpace
from tightfit.plan.steptime import StepTime

COMFORT = 0.95
SAME = 1.02
HOPELESS = 3.0
"""Layouts this many times slower than the best are not looked at: nobody would take them."""
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
    host_is_last = space.machine.host_bytes is None and "offload" not in space.pins.levers
    for host in (False, True) if host_is_last and space.levers(host=False) else (True,):
        for share in (COMFORT, 1.0):
            found = _Search(pricing, families, share, host=host).run()
            if found.plans:
                return found
    return found


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
        self.strongest = levers[-1:] if any_host else list(self.of_groups.values())[::-1]


class _Search:
    """One pass over all layouts with given levers and a given share of the card."""

    def __init__(self, pricing: Pricing, families: list[list[Layout]], share: float, *, host: bool) -> None:
        self.share = share
        self.choices: dict[int, _Choices] = {}
        self.pricing, self.space, self.host = pricing, pricing.space, host
        self.families = [[each for each in family if self._choices(each).levers] for family in families]
        self.leanest: dict[int, Candidate] = {}
        self.best: dict[Kind, Candidate] = {}
        self.too_large: dict[tuple[int | str, ...], int] = {}

    def run(self) -> Found:
        bounds = [
            (self._bound_s(layout), number, layout) for number, family in enumerate(self.families) for layout in family
        ]
        for bound_s, number, layout in sorted(bounds, key=lambda bound: bound[0]):
            if self.best and bound_s > HOPELESS * min(each.step_s for each in self.best.values()):
                break
            if self._is_beaten(layout, bound_s) or self._is_known_infeasible(number):
                continue
            if not self._fits_as_it_is(layout) and self._is_feasible(number):
                self._try(layout)
        plans = _ranked(list(self.best.values()))
        layouts = sum(len(family) for family in self.families)
        return Found(plans=tuple(plans), nearest=plans[0] if plans else self._nearest(), layouts=layouts)

    def _bound_s(self, layout: Layout) -> float:
        """No levers take less."""
        return self.pricing.cost(layout).step(self._choices(layout).levers[0]).step_s

    def _is_beaten(self, layout: Layout, bound_s: float) -> bool:
        """Whether its kind has a plan that is as fast as this layout without any levers."""
        best = self.best.get(kind_of(layout))
        return best is not None and bound_s >= best.step_s

    def _fits_as_it_is(self, layout: Layout) -> bool:
        """Keep this layout without levers, where several ranks have no lever that saves time, if it fits."""
        candidate = self.pricing.candidate(layout, self._choices(layout).levers[0])
        if self.space.machine.ranks == 1 or not self._fits(candidate):
            return False
        self.best[kind_of(layout)] = candidate
        return True

    def _is_known_infeasible(self, number: int) -> bool:
        return number in self.leanest and not self._fits(self.leanest[number])

    def _is_feasible(self, number: int) -> bool:
        """Whether the leanest member of a family fits with all levers pulled."""
        if number not in self.leanest:
            self.leanest[number] = self._leanest(self.space.leanest(self.families[number]))
        return self._fits(self.leanest[number])

    def _nearest(self) -> Candidate:
        """Where nothing fits, every family has been looked at."""
        return min(self.leanest.values(), key=self._excess)

    def _leanest(self, layouts: list[Layout]) -> Candidate:
        """The first that fits, else the one nearest to that."""
        found: list[Candidate] = []
        for layout, levers in ((one, each) for one in layouts for each in self._choices(one).strongest):
            found.append(self.pricing.candidate(layout, levers))
            if self._fits(found[-1]):
                return found[-1]
        return min(found, key=self._excess)

    def _try(self, layout: Layout) -> None:
        """Keep the cheapest levers of this layout that fit, if that is better than what its kind has."""
        kind = kind_of(layout)
        limit_s = self.best[kind].step_s if kind in self.best else float("inf")
        if self._is_too_large(layout):
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
        levers = self.space.levers_of(layout, host=self.host)
        if id(levers) not in self.choices:
            self.choices[id(levers)] = _Choices(levers, any_host=self.space.machine.host_bytes is None)
        return self.choices[id(levers)]

    def _is_too_large(self, layout: Layout) -> bool:
        """Whether even the strongest levers do not make this layout fit; larger micro-batches then need no look.

        Those with which a pipeline is not full are looked at each: they keep as many rows in flight as smaller ones.
        """
        full = self.space.fills_pipeline(layout)
        degrees = (layout.tensor, layout.pipeline, layout.context, layout.data, layout.expert, layout.zero)
        mesh = (layout.tensor_mesh, layout.tensor_depth)
        siblings = (
            *degrees,
            *mesh,
            layout.ring,
            layout.schedule,
            layout.stages_per_rank,
            self.space.accumulates(layout),
        )
        if full and layout.micro_batch >= self.too_large.get(siblings, layout.micro_batch + 1):
            return True
        if any(self._fits(self.pricing.candidate(layout, each)) for each in self._choices(layout).strongest):
            return False
        if full:
            self.too_large[siblings] = layout.micro_batch
        return True

    def _fits(self, candidate: Candidate) -> bool:
        return candidate.fits(self.space.machine, self.share)

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
