"""The search space: every layout of a machine's ranks, and every set of levers worth trying.

A layout is a way to write the ranks as pipeline × data × context × tensor, with what fits each: tensor ranks divide
heads and MLPs, pipeline ranks are at most the layers, context ranks keep at least 512 tokens each, expert ranks divide
the experts, and data ranks divide the batch. Micro-batches are divisors up to 64 rows.

Left out because something else is never worse: gpipe (1f1b takes as long and less memory), and context ranks with a
micro-batch that shares a factor with them (more data ranks with smaller micro-batches are the same, without the ring).
A pin brings them back.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from typing import Any

from tightfit.errors import UserError
from tightfit.hardware.machine import Machine
from tightfit.jobs.layout import Layout, PipelineSchedule
from tightfit.jobs.levers import Levers
from tightfit.jobs.rules.refusals import refused_by_planner
from tightfit.jobs.rules.rule import Run
from tightfit.jobs.rules.shapes import indivisible
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.pipeline import pieces_in_flight
from tightfit.plan.lever_choices import TILED_LENGTH, Wanted, lever_sets
from tightfit.plan.pins import Pins

LEAST_CONTEXT_TOKENS = 512
LARGEST_MICRO_BATCH = 64
STAGES_PER_RANK = (2, 4)
"""Of interleaved schedules."""
NO_PINS = Pins()
REFUSED_BY_SOME_LAYOUTS = ("optimizer_states", "rounding", "update_in_backward")
"""Pinned levers for which each layout is asked."""


def divisors(number: int) -> list[int]:
    """All divisors in ascending order."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each != number]


@dataclass(frozen=True)
class SearchSpace:
    """Where to look: a workload on a machine, with pins; `lossy` lets optimizer states be narrowed."""

    workload: Workload
    machine: Machine
    pins: Pins = NO_PINS
    lossy: bool = False

    def layouts(self) -> Iterator[Layout]:
        """Every layout; none where the pins leave none."""
        return chain.from_iterable(self.families())

    def families(self) -> Iterator[list[Layout]]:
        """Layouts that differ in micro-batch and schedule only, smallest micro-batch first."""
        for tensor, pipeline, context in product(self._tensor(), self._pipeline(), self._context()):
            data, rest = divmod(self.machine.ranks, tensor * pipeline * context)
            if rest or data < 1 or not self._allows("data", data) or self.workload.global_batch % data:
                continue
            for expert, zero in product(self._expert(data * context), self._zero(data * context, pipeline)):
                degrees = {"tensor": tensor, "pipeline": pipeline, "context": context, "data": data}
                made = self._schedules(degrees | {"expert": expert, "zero": zero})
                if family := [layout for layout in made if self._agrees(layout)]:
                    yield family

    def _agrees(self, layout: Layout) -> bool:
        """Whether pinned levers can be had in `layout`."""
        if self._pinned_levers is None:
            return True
        precision, accumulation = self.workload.precision, self.micro_batches(layout)
        run = Run(layout=layout, levers=self._pinned_levers, precision=precision, accumulation=accumulation)
        return refused_by_planner(run) is None

    @cached_property
    def _pinned_levers(self) -> Levers | None:
        """Those pins that not every layout agrees with."""
        given = {name: value for name, value in self.pins.levers.items() if name in REFUSED_BY_SOME_LAYOUTS}
        return Levers(**given) if given else None

    def leanest(self, family: list[Layout]) -> list[Layout]:
        """One of these needs the least memory: the smallest micro-batch of each schedule, or one of those that keep
        all there is in flight, as that does not grow with the micro-batch; or one that leaves no sums of gradients."""
        found: dict[tuple[str, int, int], Layout] = {}
        for layout in family:
            free = self.accumulates(layout) and self.fills_pipeline(layout)
            key = (layout.schedule, layout.stages_per_rank, 0 if free else layout.micro_batch)
            found.setdefault(key, layout)
        return list(found.values())

    def fills_pipeline(self, layout: Layout) -> bool:
        """Whether as many micro-batches are in flight as ever are, so that larger ones can only need more memory."""
        count = self.micro_batches(layout)
        many = count + layout.pipeline * (layout.stages_per_rank + 1)
        return pieces_in_flight(layout, 0, count) == pieces_in_flight(layout, 0, many)

    def accumulates(self, layout: Layout) -> bool:
        """Whether a step has several micro-batches, so that gradients wait between them."""
        return self.micro_batches(layout) > 1

    def micro_batches(self, layout: Layout) -> int:
        """Of a data rank per step."""
        return self.workload.global_batch // (layout.micro_batch * layout.data)

    def _allows(self, name: str, value: Any) -> bool:
        return bool(self.pins.layout.get(name, value) == value)

    def _pinned(self, name: str, values: list[int]) -> list[int]:
        return [value for value in values if self._allows(name, value)]

    def _tensor(self) -> list[int]:
        spec = self.workload.spec
        return self._pinned("tensor", [t for t in divisors(self.machine.ranks) if indivisible(spec, t) is None])

    def _pipeline(self) -> list[int]:
        return self._pinned("pipeline", [p for p in divisors(self.machine.ranks) if p <= self.workload.spec.layers])

    def _context(self) -> list[int]:
        length = self.workload.sequence_length
        usable = (c for c in divisors(self.machine.ranks) if c == 1 or _splits_rows(c, length))
        return self._pinned("context", list(usable))

    def _expert(self, ranks: int) -> list[int]:
        experts = self.workload.spec.experts
        count = experts.count if experts else 1
        return self._pinned("expert", [e for e in divisors(ranks) if count % e == 0])

    def _zero(self, ranks: int, pipeline: int) -> list[int]:
        """Pipelines have ZeRO-1 at most: more would gather or reduce with every micro-batch, and is not trained.

        A pin still says what it would cost.
        """
        stages = [0, 1] if pipeline > 1 and "zero" not in self.pins.layout else [0, 1, 2, 3]
        return self._pinned("zero", stages if ranks > 1 else [0])

    def _schedules(self, degrees: dict[str, Any]) -> Iterator[Layout]:
        rows = self.workload.global_batch // degrees["data"]
        micros = [m for m in divisors(rows) if m <= LARGEST_MICRO_BATCH]
        if "micro_batch" in self.pins.layout:
            micros = [m for m in [self.pins.layout["micro_batch"]] if rows % m == 0]
        elif not {"data", "context"} & set(self.pins.layout):
            micros = [m for m in micros if math.gcd(m, degrees["context"]) == 1]
        sequence_parallel = self.pins.layout.get("sequence_parallel", True)
        for micro, (schedule, stages) in product(micros, self._orders(degrees["pipeline"])):
            if stages > 1 and rows // micro % degrees["pipeline"]:
                continue
            order = {"micro_batch": micro, "schedule": schedule, "stages_per_rank": stages}
            yield Layout(**(degrees | order), sequence_parallel=sequence_parallel)

    def _orders(self, pipeline: int) -> list[tuple[PipelineSchedule, int]]:
        """Schedules of a pipeline, with the stages that each rank has."""
        orders: list[tuple[PipelineSchedule, int]] = [("1f1b", 1)]
        if pipeline > 1:
            fit = [stages for stages in STAGES_PER_RANK if self.workload.spec.layers >= pipeline * stages]
            orders += [("zero-bubble", 1), ("gpipe", 1), *(("interleaved", stages) for stages in fit)]
        wanted = self.pins.layout.get("schedule", None if pipeline > 1 else "1f1b")
        orders = [order for order in orders if (order[0] == wanted if wanted else order[0] != "gpipe")]
        return [order for order in orders if self._allows("stages_per_rank", order[1])]

    def levers(self, *, host: bool = True) -> list[Levers]:
        """Every set of levers, the simplest first and the strongest last; without `host` memory where that is asked."""
        long_rows = self.workload.sequence_length >= TILED_LENGTH
        wanted = Wanted(host=host, lossy=self.lossy, long_rows=long_rows, whole_batch=self._may_update_in_backward)
        return lever_sets(wanted, self.pins.levers)

    def levers_of(self, layout: Layout, levers: list[Levers]) -> list[Levers]:
        """Those of `levers` that `layout` can have: an update inside backward needs the whole batch in one."""
        if not self._may_update_in_backward or not self.accumulates(layout):
            return levers
        return [each for each in levers if not each.update_in_backward]

    @property
    def _may_update_in_backward(self) -> bool:
        return self.machine.ranks == 1 and self.workload.precision != "fp16"

    def check(self) -> None:
        """A sentence where pins or the batch leave no layout at all."""
        if next(self.layouts(), None) is None:
            raise UserError(self._why_none())
        if not self.levers():
            raise UserError(f"no set of levers agrees with {self.pins}; offload_checkpoints needs checkpoint_every=1")

    def _why_none(self) -> str:
        ranks, spec, pins = self.machine.ranks, self.workload.spec, self.pins.layout
        degrees = {name: pins[name] for name in ("data", "tensor", "pipeline", "context") if name in pins}
        for name, value in degrees.items():
            if ranks % value:
                return f"layout.{name} is {value}, which does not divide the machine's {ranks} GPUs; change one"
        if sentence := indivisible(spec, pins.get("tensor", 1)):
            return sentence
        if pins.get("pipeline", 1) > spec.layers:
            return (
                f"layout.pipeline is {pins['pipeline']}, but the model has {spec.layers} layers; give at most that many"
            )
        if (micro := pins.get("micro_batch", 1) * pins.get("data", 1)) and self.workload.global_batch % micro:
            return (
                f"global batch {self.workload.global_batch} is not a multiple of the pinned micro-batch × data ranks "
                f"({micro}); change one"
            )
        if self.pins:
            return f"no layout of {self.machine.text} agrees with all of {self.pins}; drop one"
        return (
            f"global batch {self.workload.global_batch} cannot be split over the {ranks} GPUs of {self.machine.text}; "
            f"take a multiple of {ranks} rows"
        )


def _splits_rows(context: int, length: int) -> bool:
    """Each context rank takes a piece from both ends of a row, so that causal work is even."""
    return length % (2 * context) == 0 and length // context >= LEAST_CONTEXT_TOKENS
