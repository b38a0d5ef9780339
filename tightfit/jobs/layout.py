"""Layout: how a run is spread over ranks, one degree per way of splitting.

Ranks = data × tensor × pipeline × context; experts are split over the data and context ranks they share. It is part of
the job (the trainer obeys it), of a plan (the search fills it in) and of the memory formulas (which count with it).
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from tightfit.jobs.rules.refusals import refused_layout
from tightfit.jobs.section import Section

TensorMesh = Literal["1d", "2d", "2.5d", "3d"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zb-v", "2bw"]


SPLITS = ("tensor", "pipeline", "context", "expert")
"""The degrees of a layout besides data ranks. Code that asks what else is split loops over these names."""


def stages_of_rank(rank: int, pipeline: int, pieces: int, *, in_v: bool) -> tuple[int, ...]:
    """The stages of a pipeline rank: every `pipeline`-th stage or, in a V, one on the way down and one up."""
    return (rank, 2 * pipeline - 1 - rank) if in_v else tuple(range(rank, pipeline * pieces, pipeline))


class Layout(Section):
    data: int = Field(default=1, ge=1)
    """Ranks that each train on their own share of the batch."""
    zero: Literal[0, 1, 2, 3] = 0
    """What data ranks split: 0 nothing (DDP), 1 optimizer states, 2 gradients too, 3 weights too (FSDP)."""
    shard_inside: int = Field(default=0, ge=0)
    """Hybrid sharding: neighbouring data ranks (such as a node's) that form one ZeRO group, which holds a copy; 0: all
    data ranks."""
    tensor: int = Field(default=1, ge=1)
    """Ranks that split every matrix product between them."""
    tensor_mesh: TensorMesh = "1d"
    """Shape of the mesh of tensor ranks: a line (1d), q × q (2d), d × q × q (2.5d) or q × q × q (3d)."""
    tensor_depth: int = Field(default=1, ge=1)
    """The d of a 2.5d mesh."""
    sequence_parallel: bool = True
    """Tensor ranks also split norms and residuals, along the sequence."""
    pipeline: int = Field(default=1, ge=1)
    """Ranks that hold consecutive layers each."""
    schedule: PipelineSchedule = "1f1b"
    """Pipeline schedule, the order of micro-batches on each rank; 2bw computes gradients with weights one step old."""
    stages_per_rank: int = Field(default=1, ge=1)
    """Stages of the model that each pipeline rank holds, under the schedules interleaved and zb-v (which has two)."""
    context: int = Field(default=1, ge=1)
    """Ranks that split each sequence between them."""
    ring: int = Field(default=1, ge=1)
    """Groups of context ranks that pass keys and values round a ring; inside a group ranks exchange heads (Ulysses)."""
    expert: int = Field(default=1, ge=1)
    """Data and context ranks that split the experts of a routed model between them."""
    micro_batch: int = Field(default=8, ge=1)
    """Rows of a data rank per forward pass, 8 or less unless given; a step is global_batch / (micro_batch × data)."""

    @classmethod
    def of_axes(cls, ranks: Mapping[str, int], **fields: Any) -> Self:
        """A layout from the number of ranks of each kind of split, which may also be `ring`, `heads` and `expert`.

        Context ranks are `ring` × `heads`, and data ranks are `data` × `expert`.
        """
        degrees = dict(ranks)
        degrees["context"] = degrees.get("ring", 1) * degrees.pop("heads", 1)
        degrees["data"] = degrees.get("data", 1) * degrees.get("expert", 1)
        return cls.model_validate(degrees | fields)

    @property
    def splits(self) -> dict[str, int]:
        """Degrees above one, beside data ranks."""
        return {name: degree for name in SPLITS if (degree := getattr(self, name)) > 1}

    @property
    def zero_groups(self) -> int:
        """ZeRO groups under hybrid sharding, each with a copy of what ZeRO splits; 1 without."""
        return self.data // self.shard_inside if self.shard_inside else 1

    @property
    def gradient_ranks(self) -> int:
        """Ranks with different tokens, over which gradients are summed; they form `zero_groups` ZeRO groups."""
        return self.data * self.context

    @property
    def zero_ranks(self) -> int:
        """Ranks of one ZeRO group, which split one copy of what ZeRO splits."""
        return self.gradient_ranks // self.zero_groups

    def local_length(self, length: int) -> int:
        """Tokens of a row of `length` on one context rank."""
        return length // self.context

    def whole_length(self, local_length: int) -> int:
        """Tokens of a row, `local_length` of which are on each context rank."""
        return local_length * self.context

    @property
    def ulysses_ranks(self) -> int:
        """Context ranks that exchange heads with each other (Ulysses)."""
        return self.context // self.ring

    @property
    def tensor_axes(self) -> tuple[int, int, int]:
        """Depth, rows and columns of the mesh of tensor ranks; a line is one row."""
        if self.tensor_mesh == "1d":
            return 1, 1, self.tensor
        if self.tensor_mesh == "3d":
            side = round(self.tensor ** (1 / 3))
            return side, side, side
        side = math.isqrt(self.tensor // self.tensor_depth)
        return self.tensor_depth, side, side

    @property
    def weight_ranks(self) -> int:
        """Tensor ranks with different parts of a weight: not those along a 2.5d mesh's depth, which have copies."""
        return self.tensor // self.tensor_depth

    @property
    def row_parts(self) -> int:
        """Parts into which the tensor mesh splits the rows of a micro-batch."""
        depth, rows, _ = self.tensor_axes
        return depth * rows

    @property
    def splits_stream(self) -> bool:
        """Whether tensor ranks split the residual stream: in a line along the sequence, on a mesh in any case."""
        return self.sequence_parallel or self.tensor_mesh != "1d"

    @property
    def splits_backward(self) -> bool:
        """Whether backward is split in two: for inputs, and later for weights (zero-bubble schedules)."""
        return self.pipeline > 1 and self.schedule in ("zero-bubble", "zb-v")

    @property
    def has_two_versions(self) -> bool:
        """Whether the pipeline is not flushed between steps and therefore keeps two versions of the weights (2BW)."""
        return self.pipeline > 1 and self.schedule == "2bw"

    @property
    def in_v(self) -> bool:
        """Whether stages are placed in a V, down the ranks and up again, so that rank 0 has the first and the last."""
        return self.schedule == "zb-v"

    def rank_of_stage(self, stage: int) -> int:
        """The pipeline rank that holds stage `stage`."""
        return min(stage, 2 * self.pipeline - 1 - stage) if self.in_v else stage % self.pipeline

    @property
    def ranks(self) -> int:
        """All processes of the run."""
        return self.data * self.tensor * self.pipeline * self.context

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if sentence := refused_layout(self):
            raise ValueError(sentence)
        return self
