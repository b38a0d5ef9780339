"""The search space: every layout of a machine's ranks, and every set of levers worth trying.

A layout is a factorisation of the ranks into pipeline × data × context × tensor, where tensor ranks divide heads and
MLPs, pipeline ranks are at most as many as layers, context ranks have at least 512 tokens each and exchange heads or
form a ring, expert ranks divide the experts, and data ranks divide the batch. Micro-batches are divisors up to 64 rows.

Left out because another layout is never worse: gpipe (1f1b takes as long and less memory), and context ranks with a
micro-batch that shares a factor with them (more data ranks with smaller micro-batches have the same tokens per rank,
without the exchange). A pin brings them back.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain, islice, product
from typing import Any

from tightfit.errors import UserError
from tightfit.hardware.machine import Machine
from tightfit.jobs.layout import Layout, PipelineSchedule
from tightfit.jobs.lever_table import LEVER_TABLE, Wanted
from tightfit.jobs.levers import Levers
from tightfit.jobs.rules.refusals import refused_beside, refused_levers, refused_workload
from tightfit.jobs.rules.shapes import indivisible, unshared_heads
from tightfit.jobs.rules.tensor_mesh import tensor_ranks_fill_their_mesh
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.overheads import INSTALLED, ON_CPU, Overheads
from tightfit.memory.formulas.pipeline import micro_batches_in_flight
from tightfit.plan.batch import divisors
from tightfit.plan.search.lever_choices import TILED_LENGTH, LeverSets, lever_sets
from tightfit.plan.search.pins import Pins

LEAST_CONTEXT_TOKENS = 512
LARGEST_MICRO_BATCH = 64
ASKED_REASONS = 64
"""Refused layouts whose reasons are counted for the error, if no layout is left."""
MOST_PIPELINED_LAYERS = 256
"""For deeper models the cut into stages takes minutes to compute (memory/formulas/cut.py)."""
STAGES_PER_RANK = (2, 4)
"""Values tried with interleaved schedules."""
ON_REQUEST: tuple[PipelineSchedule, ...] = ("gpipe", "2bw")
"""Schedules that are tried only if pinned: gpipe is never faster, 2bw changes the training (stale gradients)."""
NO_PINS = Pins()
NO_LEVERS = Levers()
NOT_SEARCHED = ("shard_inside", "sequence_parallel")
"""Fields that stay at their default unless they are pinned."""


class RulebookAnswers:
    """Cache of the rules' answers about layouts and levers of a search space; none depends on the card."""

    def __init__(self) -> None:
        self.levers: dict[object, LeverSets] = {}
        self.reasons: dict[Layout, str | None] = {}

    @cached_property
    def in_last_resort(self) -> "RulebookAnswers":
        """The cache of the same space with levers of last resort."""
        return RulebookAnswers()


@dataclass(frozen=True)
class SearchSpace:
    """Where to look: a workload on a machine, with pins; `lossy` lets optimizer states be narrowed."""

    workload: Workload
    machine: Machine
    pins: Pins = NO_PINS
    lossy: bool = False
    answers: RulebookAnswers = field(init=False, repr=False, compare=False, default_factory=RulebookAnswers)

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
        return replace(self, pins=self.pins.with_levers(left))._knowing(self.answers.in_last_resort)

    def with_card(self, machine: Machine) -> "SearchSpace":
        """The same space on a machine with as many cards of another kind."""
        return replace(self, machine=machine)._knowing(self.answers)

    def _knowing(self, answers: RulebookAnswers) -> "SearchSpace":
        object.__setattr__(self, "answers", answers)
        return self

    def layouts(self) -> Iterator[Layout]:
        """Every layout; none where the pins leave none."""
        return chain.from_iterable(self.families())

    def families(self, worth: Callable[[Layout], bool] = lambda layout: True) -> Iterator[list[Layout]]:
        """Groups of layouts that differ in micro-batch and schedule only, smallest micro-batch first; `worth` drops
        layouts before the rules are checked, which is slower."""
        layers = self.workload.spec.layers
        for layouts in self._every_family():
            cuttable = (layout for layout in layouts if layout.pipeline * layout.stages_per_rank <= layers)
            if family := [layout for layout in cuttable if worth(layout) and self._reason(layout) is None]:
                yield family

    def _every_family(self) -> Iterator[Iterator[Layout]]:
        """All families before the rules are checked."""
        for mesh, pipeline, (context, ring) in product(self._tensor(), self._pipeline(), self._context()):
            if pipeline * context > 1 and not self._is_mesh_worth_a_mixture(mesh):
                continue
            data, left_over = divmod(self.machine.ranks, mesh["tensor"] * pipeline * context)
            if left_over or data < 1 or not self._allows("data", data) or self.workload.global_batch % data:
                continue
            for expert, zero in product(self._expert(data * context), self._zero(data * context, pipeline)):
                degrees = mesh | {"pipeline": pipeline, "context": context, "ring": ring, "data": data}
                yield self._schedules(degrees | {"expert": expert, "zero": zero})

    def _reason(self, layout: Layout) -> str | None:
        """The sentence with which the rules refuse `layout`, or all levers in it; None where they allow it."""
        reasons = self.answers.reasons
        if layout not in reasons:
            reasons[layout] = self._found_reason(layout)
        return reasons[layout]

    def _found_reason(self, layout: Layout) -> str | None:
        if sentence := self.refusal(layout, NO_LEVERS):
            return sentence
        if not self.pins.levers or self.levers_of(layout):
            return None
        return self.refusal(layout, self.levers()[0])

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

    def _allows(self, name: str, value: Any) -> bool:
        return bool(self.pins.layout.get(name, value) == value)

    def _pinned(self, name: str, values: list[int]) -> list[int]:
        return [value for value in values if self._allows(name, value)]

    def _tensor(self) -> list[dict[str, Any]]:
        """Tensor ranks in a line, and on meshes, whose depth is at most their side unless it is pinned."""
        spec, pins = self.workload.spec, self.pins.layout
        ranks = self._pinned("tensor", divisors(self.machine.ranks))
        found = [{"tensor": t, "tensor_mesh": "1d", "tensor_depth": 1} for t in ranks if indivisible(spec, t) is None]
        for kind, tensor, depth in product(("2d", "2.5d", "3d"), ranks, divisors(self.machine.ranks)):
            mesh: dict[str, Any] = {"tensor": tensor, "tensor_mesh": kind, "tensor_depth": depth}
            layout = Layout.model_construct(**mesh)
            usual = "tensor_depth" in pins or depth <= layout.tensor_axes[1]
            if usual and tensor_ranks_fill_their_mesh(layout) is None:
                found.append(mesh)
        return [mesh for mesh in found if all(self._allows(name, value) for name, value in mesh.items())]

    def _is_mesh_worth_a_mixture(self, mesh: dict[str, Any]) -> bool:
        """Whether a mesh is tried beside pipeline or context ranks: if it is larger than a node (inside a node a line's
        collectives are faster), or pinned."""
        is_asked = "tensor_mesh" in self.pins.layout
        return mesh["tensor_mesh"] == "1d" or is_asked or mesh["tensor"] > self.machine.per_node

    def _pipeline(self) -> list[int]:
        layers = self.workload.spec.layers
        most = layers if layers <= MOST_PIPELINED_LAYERS else 1
        return self._pinned("pipeline", [p for p in divisors(self.machine.ranks) if p <= most])

    def _context(self) -> list[tuple[int, int]]:
        """Pairs of context ranks and ring; the rules later drop rings that leave too many ranks for the heads."""
        length = self.workload.sequence_length
        asked = "context" in self.pins.layout
        usable = [c for c in divisors(self.machine.ranks) if c == 1 or asked or _splits_rows(c, length)]
        return [
            (context, ring)
            for context in self._pinned("context", usable)
            for ring in self._pinned("ring", self._rings(context))
        ]

    def _rings(self, context: int) -> list[int]:
        """Ring sizes to try: 1 (heads only), all context ranks, and the smallest ring with which the others can
        exchange heads; all divisors if a ring is pinned."""
        if "ring" in self.pins.layout:
            return divisors(context)
        spec = self.workload.spec
        mixed = (r for r in divisors(context) if unshared_heads(spec, 1, context // r, context) is None)
        return sorted({1, context, next(mixed, context)})

    def _expert(self, ranks: int) -> list[int]:
        experts = self.workload.spec.experts
        count = experts.count if experts else 1
        return self._pinned("expert", [e for e in divisors(ranks) if count % e == 0])

    def _zero(self, ranks: int, pipeline: int) -> list[int]:
        """ZeRO stages to try: with a pipeline 0 and 1, as 2 and 3 would reduce or gather at every micro-batch, which
        the rules refuse; all if a stage is pinned, so that the rules' reason is reported."""
        stages = [0, 1] if pipeline > 1 and "zero" not in self.pins.layout else [0, 1, 2, 3]
        return self._pinned("zero", stages if ranks > 1 else [0])

    def _schedules(self, degrees: dict[str, Any]) -> Iterator[Layout]:
        rows = self.workload.global_batch // degrees["data"]
        micros = [m for m in range(1, LARGEST_MICRO_BATCH + 1) if rows % m == 0]
        if "micro_batch" in self.pins.layout:
            micros = [m for m in [self.pins.layout["micro_batch"]] if rows % m == 0]
        elif not {"data", "context"} & set(self.pins.layout):
            micros = [m for m in micros if math.gcd(m, degrees["context"]) == 1]
        fixed = {name: self.pins.layout[name] for name in NOT_SEARCHED if name in self.pins.layout}
        for micro, (schedule, stages) in product(micros, self._orders(degrees["pipeline"])):
            if stages > 1 and rows // micro % degrees["pipeline"]:
                continue
            if schedule == "2bw" and rows // micro < degrees["pipeline"]:
                continue
            order: dict[str, Any] = {"micro_batch": micro, "schedule": schedule, "stages_per_rank": stages}
            yield _layout(**degrees, **order, **fixed)

    def _orders(self, pipeline: int) -> list[tuple[PipelineSchedule, int]]:
        """Schedules to try with a pipeline of so many ranks, each with its stages per rank."""
        orders: list[tuple[PipelineSchedule, int]] = [("1f1b", 1)]
        if pipeline > 1:
            several = (
                (self.pins.layout["stages_per_rank"],) if "stages_per_rank" in self.pins.layout else STAGES_PER_RANK
            )
            orders += [("zero-bubble", 1), ("zb-v", 2), *(("interleaved", stages) for stages in several)]
            orders += [(schedule, 1) for schedule in ON_REQUEST]
        wanted = self.pins.layout.get("schedule", None if pipeline > 1 else "1f1b")
        orders = [order for order in orders if (order[0] == wanted if wanted else order[0] not in ON_REQUEST)]
        return [order for order in orders if self._allows("stages_per_rank", order[1])]

    def levers(self, *, host: bool = True) -> LeverSets:
        """Every set of levers, the simplest first and the strongest last; `host`: whether they may use host memory."""
        known = self.answers.levers
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
        known = self.answers.levers
        if alike not in known:
            sets, workload = self.levers(host=host), self.workload
            known[alike] = LeverSets(each for each in sets if refused_beside(workload, layout, each) is None)
        return known[alike]

    def check(self) -> None:
        """Raise a UserError if pins or the batch leave no layout or no levers."""
        if not self.levers():
            alone = Levers.model_construct(**self.pins.levers)
            raise UserError(refused_levers(alone) or f"no set of levers agrees with all of {self.pins}; drop one")
        if next(self.layouts(), None) is None:
            raise UserError(self._why_none())

    def _why_none(self) -> str:
        """A sentence why there is no layout: degrees that do not divide, a rule that the pins break, or the batch."""
        ranks, pins, spec = self.machine.ranks, self.pins.layout, self.workload.spec
        degrees = {name: pins[name] for name in ("data", "tensor", "pipeline", "context") if name in pins}
        for name, value in degrees.items():
            if ranks % value:
                return f"layout.{name} is {value}, which does not divide the machine's {ranks} GPUs; change one"
        if pins.get("pipeline", 1) > 1 and spec.layers > MOST_PIPELINED_LAYERS:
            return f"layout.pipeline is {pins['pipeline']}, which {spec.layers} layers are planned without; drop it"
        if ranks % math.prod(degrees.values()):
            product_of = " × ".join(f"layout.{name}={value}" for name, value in degrees.items())
            return f"{product_of} does not divide the machine's {ranks} GPUs; change one"
        if sentence := self._against_pins_alone(ranks // math.prod(degrees.values())):
            return sentence
        if (micro := pins.get("micro_batch", 1) * pins.get("data", 1)) and self.workload.global_batch % micro:
            return (
                f"global batch {self.workload.global_batch} is not a multiple of the pinned micro-batch × data ranks "
                f"({micro}); change one"
            )
        return self._without_batch() or self._without_a_pin()

    def _against_pins_alone(self, other_ranks: int) -> str | None:
        """The rules' sentence against the pinned splits if all other ranks are data ranks; None if they allow it."""
        pins = self.pins.layout
        names = ["tensor", "pipeline", "context", "expert"]
        names += ["ring"] if "context" in pins else []
        names += ["tensor_mesh", "tensor_depth"] if "tensor" in pins and "tensor_mesh" in pins else []
        splits = {name: pins[name] for name in names if name in pins}
        alone = Layout.model_construct(**splits, data=pins.get("data", 1) * other_ranks)
        return self.refusal(alone, NO_LEVERS)

    def _without_batch(self) -> str | None:
        """A sentence about a global batch that does not divide, if another number of rows would leave a layout."""
        rows = self.machine.ranks * self.pins.layout.get("micro_batch", 1)
        if not replace(self, workload=replace(self.workload, global_batch=rows))._has_layout():
            return None
        pinned = f" with {self.pins}" if self.pins else ""
        return (
            f"global batch {self.workload.global_batch} cannot be split over the {self.machine.ranks} GPUs of "
            f"{self.machine.text}{pinned}; take a multiple of {rows} rows"
        )

    def _without_a_pin(self) -> str:
        """A sentence with the rule that most layouts break, or the pin without which there would be a layout."""
        alone = (each for each in self.pins.own() if replace(self, pins=self.pins.without(*each))._has_layout())
        culprit = ".".join(next(alone, ()))
        reasons = (self._reason(layout) for family in self._every_family() for layout in family)
        counts = Counter(reason for reason in islice(reasons, ASKED_REASONS) if reason and culprit in reason)
        if counts:  # the most common reason is not one that another micro-batch or degree would fix
            pinned = f" that agrees with {self.pins}" if self.pins else ""
            return f"{self.machine.text} has no layout{pinned}: {counts.most_common(1)[0][0]}"
        if culprit:
            return f"no layout of {self.machine.text} for {self.workload.spec.family} agrees with {self._said(culprit)}"
        return f"no layout of {self.machine.text} agrees with all of {self.pins}; drop one"

    def _said(self, culprit: str) -> str:
        """A pin with the others beside it, and the fix."""
        section, _, name = culprit.partition(".")
        others = self.pins.without(section, name)
        beside = f" beside {others}" if others else ""
        return f"{culprit}={getattr(self.pins, section)[name]}{beside}; drop it"

    def _has_layout(self) -> bool:
        return bool(self.levers()) and next(self.layouts(), None) is not None


@lru_cache(maxsize=2**16)
def _layout(**fields: Any) -> Layout:
    """A layout without validation, as the rules are checked later; cached, because changes.py searches a hundred spaces
    with mostly the same layouts."""
    return Layout.model_construct(**fields)


def _splits_rows(context: int, length: int) -> bool:
    """Whether each context rank can have two equal pieces, one from either end of a row (for even causal work)."""
    return length % (2 * context) == 0 and length // context >= LEAST_CONTEXT_TOKENS
