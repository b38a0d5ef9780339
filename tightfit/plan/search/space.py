"""The search space: the layouts of a machine's ranks that the rules allow, and every set of levers worth trying."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain

from tightfit.hardware.machine import Machine
from tightfit.jobs.layout import Layout
from tightfit.jobs.lever_table import LEVER_TABLE, Wanted
from tightfit.jobs.levers import Levers
from tightfit.jobs.rules.refusals import refused_beside, refused_workload
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.overheads import INSTALLED, ON_CPU, Overheads
from tightfit.memory.formulas.pipeline import micro_batches_in_flight
from tightfit.plan.search.layouts import Layouts
from tightfit.plan.search.lever_choices import NO_LEVERS, TILED_LENGTH, LeverSets, lever_sets
from tightfit.plan.search.pins import Pins


class RuleCache:
    """Cache of the rules' answers about layouts and levers of a search space; none depends on the card."""

    def __init__(self) -> None:
        self.levers: dict[object, LeverSets] = {}
        self.reasons: dict[Layout, str | None] = {}
        self.families: list[list[Layout]] | None = None
        """Every layout before the rules are asked, where several kinds of cards are searched."""

    @cached_property
    def in_last_resort(self) -> "RuleCache":
        """The cache of the same space with levers of last resort."""
        return RuleCache()


@lru_cache(maxsize=16)
def _refusals_without_levers(workload: Workload) -> dict[Layout, str | None]:
    """A cache for `SearchSpace.reason`: what the rules say of layouts without levers, whatever is pinned."""
    return {}


@dataclass(frozen=True)
class SearchSpace:
    """Where to look: a workload on a machine, with pins; `lossy` lets optimizer states be narrowed."""

    workload: Workload
    machine: Machine
    pins: Pins = field(default_factory=Pins)
    lossy: bool = False
    rule_cache: RuleCache = field(init=False, repr=False, compare=False, default_factory=RuleCache)

    @property
    def overheads(self) -> Overheads:
        """Memory of the device besides tensors."""
        return ON_CPU if self.machine.is_cpu else INSTALLED

    def last_resort(self) -> "SearchSpace | None":
        """The space to search if nothing fits on several ranks: levers that only some layouts have, at their strongest;
        None on one rank, or if all such levers are pinned."""
        values = {row.name: row.last_resort for row in LEVER_TABLE if row.last_resort is not None}
        left = {name: value for name, value in values.items() if name not in self.pins.levers}
        if self.machine.ranks == 1 or not left:
            return None
        rule_cache = self.rule_cache.in_last_resort
        rule_cache.families = self.rule_cache.families
        return replace(self, pins=self.pins.with_levers(left))._sharing(rule_cache)

    def with_card(self, machine: Machine) -> "SearchSpace":
        """The same space on a machine with as many cards of another kind."""
        if self.rule_cache.families is None:
            self.rule_cache.families = [list(family) for family in self.every_layout.families()]
        return replace(self, machine=machine)._sharing(self.rule_cache)

    def _sharing(self, rule_cache: RuleCache) -> "SearchSpace":
        object.__setattr__(self, "rule_cache", rule_cache)
        return self

    @property
    def every_layout(self) -> Layouts:
        """The layouts before the rules are asked."""
        return Layouts(self.workload, self.machine, self.pins.layout)

    def layouts(self) -> Iterator[Layout]:
        """Every layout; none where the pins leave none."""
        return chain.from_iterable(self.families())

    def families(self, worth: Callable[[Layout], bool] = lambda layout: True) -> Iterator[list[Layout]]:
        """Groups of layouts that differ in micro-batch and schedule only, smallest micro-batch first; `worth` drops
        layouts before the rules are checked, which is slower."""
        layers = self.workload.spec.layers
        for layouts in self.rule_cache.families or self.every_layout.families():
            cuttable = (layout for layout in layouts if layout.pipeline * layout.stages_per_rank <= layers)
            if family := [layout for layout in cuttable if worth(layout) and self.reason(layout) is None]:
                yield family

    def reason(self, layout: Layout) -> str | None:
        """The sentence with which the rules refuse `layout`, or all levers in it; None where they allow it."""
        reasons = self.rule_cache.reasons
        if layout not in reasons:
            without_levers = self._refusals_without_levers
            if layout not in without_levers:
                without_levers[layout] = self.refusal(layout, NO_LEVERS)
            reasons[layout] = without_levers[layout]
            if reasons[layout] is None and self.pins.levers and not self.levers_of(layout):
                reasons[layout] = self.refusal(layout, self.levers()[0])
        return reasons[layout]

    @cached_property
    def _refusals_without_levers(self) -> dict[Layout, str | None]:
        return _refusals_without_levers(self.workload)

    def refusal(self, layout: Layout, levers: Levers) -> str | None:
        """The sentence with which the rules refuse a layout with levers; None where they allow it."""
        return refused_workload(self.workload, layout, levers)

    def leanest(self, family: list[Layout]) -> list[Layout]:
        """Layouts of which one needs the least memory: per schedule, the smallest micro-batch that accumulates and
        fills the pipeline (larger ones only need more), and every micro-batch that does not: those have fewer in
        flight, or no sums of gradients."""
        found: dict[tuple[str, int, int], Layout] = {}
        for layout in family:
            free = self.accumulates(layout) and self.fills_pipeline(layout)
            key = (layout.schedule, layout.stages_per_rank, 0 if free else layout.micro_batch)
            found.setdefault(key, layout)
        return list(found.values())

    def fills_pipeline(self, layout: Layout) -> bool:
        """Whether as many micro-batches are in flight as the schedule allows, so that larger ones need more memory."""
        count = self.workload.micro_batches(layout)
        many = count + layout.pipeline * (layout.stages_per_rank + 1)
        return micro_batches_in_flight(layout, 0, count) == micro_batches_in_flight(layout, 0, many)

    def accumulates(self, layout: Layout) -> bool:
        """Whether a step has several micro-batches, so that sums of gradients exist between them."""
        return self.workload.micro_batches(layout) > 1

    def levers(self, *, host: bool = True) -> LeverSets:
        """Every set of levers, the simplest first and the strongest last; `host`: whether they may use host memory."""
        known = self.rule_cache.levers
        if host not in known:
            workload = self.workload
            wanted = Wanted(
                host=host,
                lossy=self.lossy,
                long_rows=workload.sequence_length >= TILED_LENGTH,
                one_rank=self.machine.ranks == 1,
            )
            sets = lever_sets(wanted, self.pins.levers)
            if "checkpoint_every" not in self.pins.levers and workload.engine.recomputes_all_or_nothing:
                sets = [each for each in sets if each.checkpoint_every <= 1]
            known[host] = LeverSets(sets)
        return known[host]

    def levers_of(self, layout: Layout, *, host: bool = True) -> LeverSets:
        """The sets of `levers` that the rules allow for `layout`, one of `layouts`; cached by the fields of the layout
        that rules about levers read."""
        alike = (
            host,
            layout.tensor,
            layout.tensor_mesh,
            layout.pipeline > 1,
            layout.expert > 1,
            layout.schedule,
            layout.zero > 0,
            layout.ranks > 1,
            self.accumulates(layout),
        )
        known = self.rule_cache.levers
        if alike not in known:
            sets, workload = self.levers(host=host), self.workload
            known[alike] = LeverSets(each for each in sets if refused_beside(workload, layout, each) is None)
        return known[alike]
