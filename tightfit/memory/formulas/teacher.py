"""What a teacher adds to a training step (train/distillation.py): it runs before the student, and keeps nothing.

| when | bytes |
|---|---|
| always | its weights, on the GPU or on the host |
| before forward | its residual stream, a layer at work; from the host that layer's weights too |
| until the loss | its normed hidden states, and those of compared layers |
| loss | a chunk of both models' logits; from the host its output projection |
| maps | of compared layers [T, T] a row until the loss; there the student's scores and probabilities of every head |
"""

from dataclasses import dataclass

from tightfit.jobs.levers import Levers
from tightfit.jobs.teacher import Teacher
from tightfit.levers.policy.loss_chunks import (
    SPLIT_PRODUCT_BYTES,
    DistillationChunks,
    distillation_chunks,
    distillation_row_bytes,
)
from tightfit.memory.formulas.layer import layer_cost
from tightfit.memory.formulas.local_shape import LocalShape
from tightfit.models.spec import ModelSpec

WIDE = 4


@dataclass(frozen=True, kw_only=True)
class TeacherMemory:
    """Bytes by the time they are there."""

    gpu_weights: int = 0
    host_weights: int = 0
    teaching: int = 0
    """While it runs."""
    until_loss: int = 0
    at_loss: int = 0
    """From the host: its output projection."""
    chunk: int = 0
    sums_are_narrow: bool = False
    """Whether the output projection's gradient is summed in 24 bits (kernels/split_sum.py)."""


def distilled_chunks(student: ModelSpec, shape: LocalShape, levers: Levers, *, is_bf16: bool) -> DistillationChunks:
    """How the distillation loss of a micro-batch is cut."""
    return distillation_chunks(
        shape.tokens,
        student.vocab_size,
        student.hidden_size,
        shape.element_bytes,
        levers.loss_chunk_bytes,
        narrow=is_bf16,
    )


def teacher_memory(
    teacher: Teacher | None, student: ModelSpec, shape: LocalShape, levers: Levers, *, is_bf16: bool
) -> TeacherMemory:
    """The teacher of a student of this shape; nothing without one."""
    if teacher is None:
        return TeacherMemory()
    spec, on_host = teacher.spec, teacher.place == "host"
    hidden_bytes = shape.hidden_bytes(spec)
    head_bytes = shape.element_bytes * spec.vocab_size * spec.hidden_size
    arriving_bytes = max(spec.layer_params(i) for i in range(spec.layers)) * shape.element_bytes if on_host else 0
    map_bytes = WIDE * shape.rows * shape.length**2 if teacher.maps else 0  # averaged over heads
    teaching_maps_bytes = (teacher.maps + 3 * spec.heads) * map_bytes
    student_maps_bytes = teacher.maps * (3 * student.heads + 2) * map_bytes
    features_bytes = teacher.features * shape.hidden_bytes(student)
    row_bytes = distillation_row_bytes(student.vocab_size, shape.element_bytes, fused=True)
    chunks = distilled_chunks(student, shape, levers, is_bf16=is_bf16)
    product_bytes = SPLIT_PRODUCT_BYTES if chunks.sum_bytes < WIDE else 0
    working_bytes = layer_cost(spec, spec.layers - 1, shape).forward_working
    return TeacherMemory(
        gpu_weights=0 if on_host else teacher.weight_bytes,
        host_weights=teacher.weight_bytes if on_host else 0,
        teaching=hidden_bytes + working_bytes + arriving_bytes + teaching_maps_bytes,
        until_loss=hidden_bytes + features_bytes + teacher.maps * map_bytes,
        at_loss=(head_bytes if on_host else 0) + student_maps_bytes,
        chunk=min(chunks.rows, shape.tokens) * row_bytes + product_bytes,
        sums_are_narrow=chunks.sum_bytes < WIDE,
    )
