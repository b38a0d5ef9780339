"""Layouts: every way to spread a workload over a machine's ranks, before the rules are asked.

A layout is a factorisation of the ranks into pipeline × data × context × tensor, where tensor ranks divide heads and
MLPs, pipeline ranks are at most as many as layers, context ranks have at least 512 tokens each and exchange heads or
form a ring, expert ranks divide the experts, and data ranks divide the batch. Micro-batches are divisors up to 64 rows.

Left out because another layout is never worse: gpipe (1f1b takes as long and less memory), and context ranks with a
micro-batch that shares a factor with them (more data ranks with smaller micro-batches have the same tokens per rank,
without the exchange). A pin brings them back.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from tightfit.hardware.machine import Machine
from tightfit.jobs.layout import SPLITS, Layout, PipelineSchedule
from tightfit.jobs.rules.shapes import indivisible, unshared_heads
from tightfit.jobs.rules.tensor_mesh import tensor_ranks_fill_their_mesh
from tightfit.jobs.workload import Workload
from tightfit.plan.batch import divisors

RANK_DEGREES = ("data", "tensor", "pipeline", "context")
"""Degrees whose product is the number of ranks."""
LEAST_CONTEXT_TOKENS = 512
LARGEST_MICRO_BATCH = 64
MOST_PIPELINED_LAYERS = 256
"""For deeper models the cut into stages takes minutes to compute (memory/formulas/cut.py)."""
STAGES_PER_RANK = (2, 4)
"""Values tried with interleaved schedules."""
ON_REQUEST: tuple[PipelineSchedule, ...] = ("gpipe", "2bw")
"""Schedules that are tried only if pinned: gpipe is never faster, 2bw changes the training (stale gradients)."""
NOT_SEARCHED = ("shard_inside", "sequence_parallel")
"""Fields that stay at their default unless they are pinned."""


@dataclass(frozen=True)
class Layouts:
    """The layouts of a workload on a machine, with the fields that the user has pinned."""

    workload: Workload
    machine: Machine
    pins: Mapping[str, Any]

    def families(self) -> Iterator[Iterator[Layout]]:
        """Groups of layouts that differ in micro-batch and schedule only, smallest micro-batch first."""
        for mesh, pipeline, (context, ring) in product(self._tensor(), self._pipeline(), self._context()):
            if pipeline * context > 1 and not self._is_mesh_worth_a_mixture(mesh):
                continue
            data, left_over = divmod(self.machine.ranks, mesh["tensor"] * pipeline * context)
            if left_over or data < 1 or not self._allows("data", data) or self.workload.global_batch % data:
                continue
            for expert, zero in product(self._expert(data * context), self._zero(data * context, pipeline)):
                degrees = mesh | {"pipeline": pipeline, "context": context, "ring": ring, "data": data}
                yield self._family(degrees | {"expert": expert, "zero": zero})

    def pinned_alone(self) -> Layout:
        """The pinned splits, with all other ranks as data ranks."""
        pins = self.pins
        ring = ["ring"] if "context" in pins else []
        mesh = ["tensor_mesh", "tensor_depth"] if "tensor" in pins and "tensor_mesh" in pins else []
        splits = {name: pins[name] for name in (*SPLITS, *ring, *mesh) if name in pins}
        pinned_ranks = math.prod(pins.get(name, 1) for name in RANK_DEGREES)
        return Layout.model_construct(**splits, data=pins.get("data", 1) * (self.machine.ranks // pinned_ranks))

    def _allows(self, name: str, value: Any) -> bool:
        return bool(self.pins.get(name, value) == value)

    def _allowed(self, name: str, values: list[int]) -> list[int]:
        return [value for value in values if self._allows(name, value)]

    def _tensor(self) -> list[dict[str, Any]]:
        """Tensor ranks in a line, and on meshes, whose depth is at most their side unless it is pinned."""
        spec = self.workload.spec
        ranks = self._allowed("tensor", divisors(self.machine.ranks))
        found = [{"tensor": t, "tensor_mesh": "1d", "tensor_depth": 1} for t in ranks if indivisible(spec, t) is None]
        for kind, tensor, depth in product(("2d", "2.5d", "3d"), ranks, divisors(self.machine.ranks)):
            mesh: dict[str, Any] = {"tensor": tensor, "tensor_mesh": kind, "tensor_depth": depth}
            layout = Layout.model_construct(**mesh)
            usual = "tensor_depth" in self.pins or depth <= layout.tensor_axes[1]
            if usual and tensor_ranks_fill_their_mesh(layout) is None:
                found.append(mesh)
        return [mesh for mesh in found if all(self._allows(name, value) for name, value in mesh.items())]

    def _is_mesh_worth_a_mixture(self, mesh: dict[str, Any]) -> bool:
        """Whether a mesh is tried beside pipeline or context ranks: if it is larger than a node (inside a node a line's
        collectives are faster), or pinned."""
        return mesh["tensor_mesh"] == "1d" or "tensor_mesh" in self.pins or mesh["tensor"] > self.machine.per_node

    def _pipeline(self) -> list[int]:
        layers = self.workload.spec.layers
        most = layers if layers <= MOST_PIPELINED_LAYERS else 1
        return self._allowed("pipeline", [p for p in divisors(self.machine.ranks) if p <= most])

    def _context(self) -> list[tuple[int, int]]:
        """Pairs of context ranks and ring; the rules later drop rings that leave too many ranks for the heads."""
        degrees = divisors(self.machine.ranks)
        if "context" not in self.pins:
            degrees = [degree for degree in degrees if degree == 1 or self._has_even_pieces(degree)]
        return [
            (context, ring)
            for context in self._allowed("context", degrees)
            for ring in self._allowed("ring", self._rings(context))
        ]

    def _has_even_pieces(self, context: int) -> bool:
        """Whether each context rank can have two equal pieces, one from either end of a row (for even causal work)."""
        length = self.workload.sequence_length
        return length % (2 * context) == 0 and length // context >= LEAST_CONTEXT_TOKENS

    def _rings(self, context: int) -> list[int]:
        """Ring sizes to try: 1 (heads only), all context ranks, and the smallest ring with which the others can
        exchange heads; all divisors if a ring is pinned."""
        if "ring" in self.pins:
            return divisors(context)
        spec = self.workload.spec
        mixed = (r for r in divisors(context) if unshared_heads(spec, 1, context // r, context) is None)
        return sorted({1, context, next(mixed, context)})

    def _expert(self, ranks: int) -> list[int]:
        experts = self.workload.spec.experts
        count = experts.count if experts else 1
        return self._allowed("expert", [e for e in divisors(ranks) if count % e == 0])

    def _zero(self, ranks: int, pipeline: int) -> list[int]:
        """ZeRO stages to try: with a pipeline 0 and 1, as 2 and 3 would reduce or gather at every micro-batch, which
        the rules refuse; all if a stage is pinned, so that the rules' reason is reported."""
        stages = [0, 1] if pipeline > 1 and "zero" not in self.pins else [0, 1, 2, 3]
        return self._allowed("zero", stages if ranks > 1 else [0])

    def _family(self, degrees: dict[str, Any]) -> Iterator[Layout]:
        """Layouts of these degrees with every micro-batch and schedule."""
        rows, pipeline = self.workload.global_batch // degrees["data"], degrees["pipeline"]
        micros = [self.pins["micro_batch"]] if "micro_batch" in self.pins else range(1, LARGEST_MICRO_BATCH + 1)
        micros = [micro for micro in micros if rows % micro == 0]
        if not {"micro_batch", "data", "context"} & set(self.pins):
            micros = [micro for micro in micros if math.gcd(micro, degrees["context"]) == 1]
        fixed = {name: self.pins[name] for name in NOT_SEARCHED if name in self.pins}
        for micro, (schedule, stages) in product(micros, self._schedules(pipeline)):
            leaves_gaps = stages > 1 and rows // micro % pipeline
            if not leaves_gaps and not (schedule == "2bw" and rows // micro < pipeline):
                tried: dict[str, Any] = {"micro_batch": micro, "schedule": schedule, "stages_per_rank": stages}
                yield _layout(**degrees, **tried, **fixed)

    def _schedules(self, pipeline: int) -> list[tuple[PipelineSchedule, int]]:
        """Schedules to try with a pipeline of so many ranks, each with its stages per rank."""
        found: list[tuple[PipelineSchedule, int]] = [("1f1b", 1)]
        if pipeline > 1:
            several = (self.pins["stages_per_rank"],) if "stages_per_rank" in self.pins else STAGES_PER_RANK
            found += [("zero-bubble", 1), ("zb-v", 2), *(("interleaved", stages) for stages in several)]
            found += [(schedule, 1) for schedule in ON_REQUEST]
        wanted = self.pins.get("schedule", None if pipeline > 1 else "1f1b")
        return [
            (schedule, stages)
            for schedule, stages in found
            if (schedule == wanted if wanted else schedule not in ON_REQUEST)
            and self._allows("stages_per_rank", stages)
        ]


@lru_cache(maxsize=2**16)
def _layout(**fields: Any) -> Layout:
    """A layout without validation, as the rules are checked later; cached, because changes.py searches a hundred spaces
    with mostly the same layouts."""
    return Layout.model_construct(**fields)
