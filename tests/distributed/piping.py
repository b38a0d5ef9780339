"""Cases whose layers are spread over the ranks of a pipeline."""

from dataclasses import dataclass, replace

from tests.distributed.training import Case
from tests.train.models import TINY
from tightfit.jobs.layout import Layout, PipelineSchedule
from tightfit.models.spec import ModelSpec

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
        alone = self.alone()
        assert isinstance(alone, Piped)
        return replace(alone, pipeline=1, schedule="1f1b", stages_per_rank=1)
