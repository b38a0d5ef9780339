"""Search: the fastest layout and levers that fit, and the best of each other kind. A branch and bound.

Every lever costs time and none adds memory, so a layout's time without levers is a lower bound of its time, and its
memory with all levers a lower bound of its memory. (Updates inside backward may save a few percent of time, as they
move fewer bytes than a step's update; but they clip by an estimate, so where no states are on the host they are ranked
as if they saved nothing.) A family of layouts (same degrees) is dropped if none of its leanest members fits with every
lever pulled. The other families' layouts are tried in the order of their lower bounds of time. Of the sets of levers
that leave a layout fast enough, the strongest are checked first: if they do not fit, no weaker ones do; if they do, the
fastest set that fits is kept. Layouts have kinds (which degrees are above one, which ZeRO stage); once a kind has a
plan, its slower layouts are skipped, and once REPORTED_KINDS kinds have one, all layouts slower than those plans.

If nothing fits on several ranks, levers that only some layouts have (`SearchSpace.last_resort`) are searched as well.
Plans that leave 5 % of the card free are looked for first, as formulas and fragmentation are not more accurate than
that; then plans that just fit. If the host's memory is unknown, offload is tried last. The winner is the simplest of
the plans within 2 % of the fastest: the model of time is not more accurate than that.
"""

from dataclasses import dataclass
from functools import partial

from tightfit.errors import UserError
from tightfit.jobs.layout import SPLITS, Layout
from tightfit.jobs.levers import Levers
from tightfit.plan.search.candidate import Candidate, Pricing
from tightfit.plan.search.lever_choices import STATES_LEVER, weaker
from tightfit.plan.search.no_layout import check
from tightfit.plan.search.space import SearchSpace

COMFORT = 0.95
SAME = 1.02
HOPELESS = 3.0
"""Layouts this many times slower than the best are not searched: they are no alternatives."""
REPORTED_KINDS = 6
"""Kinds of layouts that an answer reports: the fastest, and five others."""
LayoutKind = tuple[int | str, ...]


@dataclass(frozen=True, kw_only=True)
class Found:
    """Result of a search: plans that fit, best first, and the one that is nearest to fitting."""

    plans: tuple[Candidate, ...]
    nearest: Candidate
    layouts: int

    @property
    def best(self) -> Candidate | None:
        """The recommendation."""
        return self.plans[0] if self.plans else None


def search(space: SearchSpace, only: list[list[Layout]] | None = None) -> Found:
    """The best plan of each kind, from all families of layouts or from `only` some."""
    found = _found(space, only)
    with_last_resort = None if found.plans or only is not None else space.last_resort()
    if with_last_resort is None:
        return found
    try:
        last = _found(with_last_resort)
    except UserError:  # no layout has these levers
        return found
    if last.plans:
        return last
    nearest = min((found.nearest, last.nearest), key=lambda each: each.shortage_bytes(space.machine))
    return Found(plans=(), nearest=nearest, layouts=found.layouts)


def _found(space: SearchSpace, only: list[list[Layout]] | None = None) -> Found:
    """The result of one search, without levers of last resort."""
    check(space)
    pricing = Pricing(space)
    families = pricing.within_budget(list(space.families()) if only is None else only)
    for host in _host_uses(space):
        for share in (COMFORT, 1.0):
            attempt = _Search(pricing, families, share, host=host)
            if plans := attempt.plans():
                return Found(plans=tuple(plans), nearest=plans[0], layouts=attempt.layouts)
    return Found(plans=(), nearest=attempt.nearest(), layouts=attempt.layouts)


def _host_uses(space: SearchSpace) -> tuple[bool, ...]:
    """Whether levers may use host memory, in the order to try: if its size is unknown first not, if it is 0 never."""
    if space.machine.host_bytes or STATES_LEVER in space.pins.levers or not space.levers(host=False):
        return (True,)
    return (False, True) if space.machine.host_bytes is None else (False,)


def cheapest_that_fits(space: SearchSpace, layout: Layout, wanted: Levers, room_bytes: int) -> Candidate | None:
    """The levers that, added to `wanted`, make `layout` fit in `room_bytes` at the least cost of time; None if none do.

    Of sets within 2 % of the fastest, the simplest.
    """
    pricing, fitting = Pricing(space), list[Candidate]()
    choices = (_joined(wanted, each) for each in space.levers_of(layout))
    for levers in sorted(choices, key=lambda each: pricing.ranking_s(layout, each)):
        tried = pricing.candidate(layout, levers)
        if fitting and pricing.ranking_s(layout, levers) > SAME * pricing.ranking_s(layout, fitting[0].levers):
            break
        if tried.gpu_bytes <= room_bytes and tried.fits(space.machine):
            fitting.append(tried)
    return min(fitting, key=lambda each: (each.complexity, each.step_s), default=None)


def _joined(wanted: Levers, more: Levers) -> Levers:
    """`more`, with fields of `wanted` that the search does not decide."""
    decided = {name: getattr(more, name) for name in more.model_fields_set}
    return Levers(**(wanted.model_dump() | decided))


class _Search:
    """One pass over all layouts with given levers and a given share of the card."""

    def __init__(self, pricing: Pricing, families: list[list[Layout]], share: float, *, host: bool) -> None:
        self.pricing, self.space, self.share = pricing, pricing.space, share
        self.step_s, self.fits = pricing.ranking_s, partial(pricing.fits, share=share)
        self.levers = partial(self.space.levers_of, host=host)
        """From a layout to the sets of levers it can have."""
        self.families = [[each for each in family if self.levers(each)] for family in families]
        self.feasible: dict[int, bool] = {}
        self.best: dict[LayoutKind, Candidate] = {}

    @property
    def layouts(self) -> int:
        """Number of layouts in the search."""
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
            if bound_s < self._limit_s(kind_of(layout)) and self._is_feasible(number):
                self._keep_fastest_that_fits(layout)
        return _ranked(list(self.best.values()))

    def nearest(self) -> Candidate:
        """The candidate that lacks the fewest bytes; of equals, the fastest."""
        best: Candidate | None = None
        for layout in (each for family in self.families for each in self.space.leanest(family)):
            for levers in self._strongest(layout):
                least = self._shortage(self.pricing.least(layout, levers))
                if best is None or least <= self._shortage(best):
                    tried = self.pricing.candidate(layout, levers)
                    best = min((best or tried, tried), key=lambda each: (self._shortage(each), each.step_s))
        assert best is not None
        return best

    def _bound_s(self, layout: Layout) -> float | None:
        """A lower bound of the layout's step time: the weakest levers of the first group whose strongest may fit; None
        if no group's may."""
        groups = self.levers(layout).groups.values()
        weakest = next((group[0] for group in groups if self.pricing.may_fit(layout, group[-1], self.share)), None)
        return None if weakest is None else self.step_s(layout, weakest)

    def _limit_s(self, kind: LayoutKind | None = None) -> float:
        """The step time from which on a plan would not be reported: its kind, or REPORTED_KINDS kinds, have faster
        ones, or it is HOPELESS times slower; but plans within 2 % of the fastest always count, as they may be
        simpler."""
        if not self.best:
            return float("inf")
        times_s = sorted(each.step_s for each in self.best.values())
        limit_s = HOPELESS * times_s[0]
        if len(times_s) >= REPORTED_KINDS:
            limit_s = min(limit_s, max(times_s[REPORTED_KINDS - 1], SAME * times_s[0]))
        return min(limit_s, self.best[kind].step_s) if kind in self.best else limit_s

    def _is_feasible(self, number: int) -> bool:
        """Whether one of the leanest members of a family fits with all levers pulled."""
        if number not in self.feasible:
            leanest = self.space.leanest(self.families[number])
            pairs = ((layout, each) for layout in leanest for each in self._strongest(layout))
            self.feasible[number] = any(self.fits(layout, levers) for layout, levers in pairs)
        return self.feasible[number]

    def _keep_fastest_that_fits(self, layout: Layout) -> None:
        """Keep the fastest levers of this layout that fit, if they beat the best plan of its kind."""
        kind = kind_of(layout)
        limit_s = self._limit_s(kind)
        groups = self.levers(layout).groups.values()
        may_fit = [each for group in groups for each in self._below_what_fits(layout, group, limit_s)]
        failed: list[Levers] = []
        for levers in sorted(may_fit, key=lambda each: self.step_s(layout, each)):
            if any(weaker(levers, other) for other in failed):
                continue
            if self.fits(layout, levers):
                self.best[kind] = self.pricing.candidate(layout, levers)
                return
            failed.append(levers)

    def _below_what_fits(self, layout: Layout, group: list[Levers], limit_s: float) -> list[Levers]:
        """Sets of a group that are fast enough and may fit: they fit, or a set at least as strong does."""
        below: list[Levers] = []
        fails: list[Levers] = []
        for levers in reversed(self._fast_enough(layout, group, limit_s)):
            if any(weaker(levers, other) for other in fails):
                continue
            is_below = any(weaker(levers, other) for other in below) or self.fits(layout, levers)
            (below if is_below else fails).append(levers)
        return below[::-1]

    def _fast_enough(self, layout: Layout, group: list[Levers], limit_s: float) -> list[Levers]:
        """Sets of a group that take less than `limit_s`; on several ranks, skipping sets stronger than a slow one."""
        fast: list[Levers] = []
        slow: list[Levers] = []
        if not self.pricing.may_fit(layout, group[-1], self.share):
            return fast
        for levers in group:
            if self.space.machine.ranks > 1 and any(weaker(other, levers) for other in slow):
                continue
            (fast if self.step_s(layout, levers) < limit_s else slow).append(levers)
        return fast

    def _strongest(self, layout: Layout) -> list[Levers]:
        return self.levers(layout).strongest(any_host=self.space.machine.host_bytes is None)

    def _shortage(self, candidate: Candidate) -> int:
        return candidate.shortage_bytes(self.space.machine, self.share)


def kind_of(layout: Layout) -> LayoutKind:
    """Which degrees are above one, the tensor mesh, and the ZeRO stage."""
    return (*(getattr(layout, name) > 1 for name in SPLITS), layout.tensor_mesh, layout.zero)


def _ranked(plans: list[Candidate]) -> list[Candidate]:
    """Fastest first, except that the simplest of the plans within 2 % of the fastest comes before all."""
    if not plans:
        return []
    fastest = min(each.step_s for each in plans)
    same = [each for each in plans if each.step_s <= SAME * fastest]
    winner = min(same, key=lambda each: (each.complexity, each.step_s))
    return [winner, *sorted((each for each in plans if each is not winner), key=lambda each: each.step_s)]
