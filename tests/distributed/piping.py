"""A few training steps of a tiny model as a rank of a pipeline, and what all its ranks have, put together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from tests.distributed.training import CPU, TINY, Case, Trace, build, micro_batches, states_of, wholes
from tightfit.jobs.layout import Layout, PipelineSchedule
from tightfit.models.spec import ModelSpec
from tightfit.parallel.mesh import make_mesh
from tightfit.parallel.pipeline import Pipeline
from tightfit.parallel.ranks import Ranks
from tightfit.parallel.shards import described, splits_of, whole
from tightfit.train.precision import LossScale
from tightfit.train.step import train_step

DEEP = replace(TINY, layers=5)
"""Layers that do not divide evenly, and enough of them for four stages."""


@dataclass(frozen=True)
class Piped(Case):
    """A case whose layers are spread over `pipeline` ranks."""

    spec: ModelSpec = DEEP
    micro_batch: int = 2
    pipeline: int = 2
    schedule: PipelineSchedule = "1f1b"
    stages_per_rank: int = 1

    @property
    def layout(self) -> Layout:
        own = {"pipeline": self.pipeline, "schedule": self.schedule, "stages_per_rank": self.stages_per_rank}
        return Layout.model_validate(super().layout.model_dump() | own)

    def whole(self) -> Case:
        """The same on one process that takes all rows at once."""
        case = replace(self.alone(), pipeline=1, schedule="1f1b", stages_per_rank=1)
        return case


def run_piped(case: Piped) -> Trace:
    """The steps of one rank, with what it has of weights, gradients and states."""
    mesh = make_mesh(case.layout, "cpu")
    ranks = Ranks.of(mesh)
    decoder, module, optimizer = build(case, mesh)
    assert isinstance(module, Pipeline)
    trace = Trace(first=wholes(decoder))

    def look(phase: str) -> None:
        if phase == "optimizer":
            splits = splits_of(decoder)
            named = [(n, p.grad) for n, p in decoder.named_parameters() if p.grad is not None]
            trace.gradients.append({n: whole(described(g, splits.get(n))).clone() for n, g in named})

    scale = LossScale.for_precision(case.precision)
    scale.value = case.scale or scale.value
    for step in range(case.steps):
        batches = micro_batches(case, step, ranks.rank)
        trace.results.append(train_step(module, optimizer, batches, CPU, case.settings.lr, scale, look, ranks))
    trace.last = wholes(decoder)
    trace.states = states_of(case, optimizer)
    return trace


def joined(traces: Sequence[Trace]) -> Trace:
    """What the ranks of a pipeline have together; of what several have, the copies must be equal to the bit."""
    steps = range(len(traces[0].gradients))
    return Trace(
        traces[0].results, [_united([t.gradients[step] for t in traces]) for step in steps],
        _united([t.first for t in traces]), _united([t.last for t in traces]), _united([t.states for t in traces]),
    )  # fmt: skip


def _united(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            assert name not in found or found[name].equal(tensor), f"ranks differ in {name}"
            found[name] = tensor
    return found
