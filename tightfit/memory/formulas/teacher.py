"""What a teacher adds to a training step (train/distillation.py): it runs before the student, without autograd.

| when | bytes |
|---|---|
| always | its weights, on the GPU or on the host |
| before forward | its residual stream, a layer at work; if offloaded that layer's weights too |
| until the loss | its normed hidden states, and those of compared layers |
| loss | a chunk of the student's logits and a part of the teacher's; if offloaded the teacher's output projection |
| maps | [T, T] per row and compared layer until the loss; there also the student's scores, probabilities of all heads |
"""

from dataclasses import dataclass, replace

from tightfit.jobs.levers import Levers
from tightfit.jobs.precision import FLOAT32_BYTES
from tightfit.jobs.teacher import Teacher
from tightfit.levers.policy.loss_chunks import distillation_chunks
from tightfit.memory.formulas.layer import layer_cost
from tightfit.memory.formulas.local_shape import LocalShape


@dataclass(frozen=True, kw_only=True)
class TeacherMemory:
    """Bytes that a teacher adds, by when they exist."""

    gpu_weights: int = 0
    host_weights: int = 0
    teaching: int = 0
    """While the teacher runs."""
    until_loss: int = 0
    at_loss: int = 0
    chunk: int = 0
    """Logits of both models, and the products that are added to the gradient of the output projection."""
    sum_bytes: int = FLOAT32_BYTES
    """Bytes per number of the sum of the output projection's gradient: 4, or 3 (kernels/loss/split_sum.py)."""


def teacher_memory(teacher: Teacher | None, student_shape: LocalShape, levers: Levers, *, bf16: bool) -> TeacherMemory:
    """Bytes of the teacher of a student with `student_shape`, whose loss is in bf16 or not; all 0 without a teacher."""
    if teacher is None:
        return TeacherMemory()
    shape, spec, student = replace(student_shape, spec=teacher.spec), teacher.spec, student_shape.spec
    on_host, element_bytes = teacher.place == "host", shape.element_bytes
    head_bytes = element_bytes * spec.vocabulary_params if on_host else 0
    arriving_bytes = max(spec.layer_params(i) for i in range(spec.layers)) * element_bytes if on_host else 0
    map_bytes = FLOAT32_BYTES * shape.rows * shape.length**2 if teacher.maps else 0  # averaged over heads
    teaching_maps_bytes = (teacher.maps + 3 * spec.heads) * map_bytes
    student_maps_bytes = teacher.maps * (3 * student.heads + 2) * map_bytes
    features_bytes = teacher.features * student_shape.hidden_bytes
    sizes = shape.tokens, student.vocab_size, student.hidden_size, element_bytes
    chunks = distillation_chunks(*sizes, levers.loss_chunk_bytes, narrow=bf16)
    working_bytes = layer_cost(shape, spec.layers - 1).forward_working
    return TeacherMemory(
        gpu_weights=0 if on_host else teacher.weight_bytes,
        host_weights=teacher.weight_bytes if on_host else 0,
        teaching=shape.hidden_bytes + working_bytes + arriving_bytes + teaching_maps_bytes,
        until_loss=shape.hidden_bytes + features_bytes + teacher.maps * map_bytes,
        at_loss=head_bytes + student_maps_bytes,
        chunk=chunks.held_bytes,
        sum_bytes=chunks.sum_bytes,
    )
