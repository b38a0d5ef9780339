"""Workload: the part of a job on which memory and time depend, without its data and its output."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tightfit.errors import UserError
from tightfit.jobs.adapter import Adapted
from tightfit.jobs.engine import ENGINES, Engine, EngineName
from tightfit.jobs.precision import FLOAT32_BYTES, PrecisionName
from tightfit.jobs.quantize import WeightRounding
from tightfit.jobs.teacher import SELF, Teacher, held_weight_bytes
from tightfit.models.resolve import resolve_spec
from tightfit.models.spec import ModelSpec

if TYPE_CHECKING:
    from tightfit.jobs.job import Job
    from tightfit.jobs.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One optimizer step: `global_batch` rows of `sequence_length` tokens through `spec` in `precision`."""

    spec: ModelSpec
    sequence_length: int
    global_batch: int
    precision: PrecisionName = "bf16"
    engine_name: EngineName = "tightfit"
    """The framework that runs it (jobs/engine.py)."""
    teacher: Teacher | None = None
    rounding: WeightRounding | None = None
    """How weights are rounded while they are trained."""
    adapted: Adapted | None = None
    """Adapters that are trained on top of a frozen model."""
    shrinks: bool = False
    """Whether every step moves weights towards zero (optimizer.l1)."""
    keeps_zeros: bool = False
    """Whether weights that are zero stay so (optimizer.keep_zeros)."""

    def __post_init__(self) -> None:
        for name, least in (("sequence_length", 2), ("global_batch", 1)):
            if (value := getattr(self, name)) < least:
                raise UserError(f"{name} is {value}; give at least {least}")
        if self.sequence_length > self.spec.max_positions:
            raise UserError(
                f"sequence_length is {self.sequence_length}, but the model has {self.spec.max_positions} positions; "
                "shorten it or choose a model with more"
            )

    @classmethod
    def of_job(
        cls, job: "Job", spec: ModelSpec, precision: PrecisionName, teacher: ModelSpec | None = None
    ) -> "Workload":
        """The workload of `job` on a device that computes in `precision`; `teacher` is the shape of its teacher."""
        return cls(
            teacher=None if teacher is None else teacher_of(job, teacher, precision),
            spec=spec,
            sequence_length=job.data.sequence_length,
            global_batch=job.global_batch,
            precision=precision,
            rounding=job.quantize.rounding,
            adapted=job.adapter.on(job.model.source, spec),
            shrinks=job.optimizer.l1 > 0,
            keeps_zeros=job.optimizer.keep_zeros,
        )

    @property
    def engine(self) -> Engine:
        """The engine that runs it."""
        return ENGINES[self.engine_name]

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.global_batch * self.sequence_length

    def micro_batches(self, layout: "Layout") -> int:
        """Micro-batches of a step on each data rank of `layout`."""
        return max(1, self.global_batch // (layout.micro_batch * layout.data))

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight, an activation or a gradient."""
        return 4 if self.precision == "fp32" else 2

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates float32 masters of 16-bit weights."""
        return self.precision in ("bf16", "fp16")

    @property
    def updated_bytes(self) -> int:
        """Bytes of a weight where the optimizer updates it: of its master, where it has one."""
        return 2 if self.precision == "pure-bf16" else FLOAT32_BYTES

    @property
    def updates_wide(self) -> bool:
        """Whether the optimizer updates float32 tensors, masters or weights."""
        return self.precision != "pure-bf16"


def teacher_of(job: "Job", spec: ModelSpec, precision: PrecisionName) -> Teacher:
    """The teacher of `job`, whose shape is `spec`."""
    distill = job.distill
    assert distill.teacher is not None
    source = job.model.source if distill.teacher == SELF else distill.teacher
    return Teacher(
        spec=spec,
        weight_bytes=held_weight_bytes(source, spec, 4 if precision == "fp32" else 2),
        place=distill.place,
        features=distill.feature_layers if distill.features else 0,
        maps=distill.feature_layers if distill.attention else 0,
    )


def with_teacher(workload: Workload, job: "Job") -> Workload:
    """`workload` with `job`'s teacher, rounded weights, adapters and L1; without torch, so shapes must come from a
    directory or a preset."""
    adapted = job.adapter.on(job.model.source, workload.spec)
    workload = replace(workload, rounding=job.quantize.rounding, adapted=adapted)
    workload = replace(workload, shrinks=job.optimizer.l1 > 0, keeps_zeros=job.optimizer.keep_zeros)
    if job.distill.teacher is None:
        return workload
    spec = resolve_spec(job.model.source if job.distill.teacher == SELF else job.distill.teacher)
    return replace(workload, teacher=teacher_of(job, spec, workload.precision))
