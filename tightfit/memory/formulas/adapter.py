"""Adapters on a frozen model (levers/adapter.py): bytes that differ from training the model itself.

| what | bytes |
|---|---|
| the frozen model | as plain numbers, or as codes; no gradient, no states |
| x of a projection | kept where its adapter needs it for A's gradient: q, k and v share one, gate and up another |
| the MLP's product | kept where `down` has an adapter, as its x |
| A x | rank numbers a token of every adapted projection |
| a frozen matrix at work | expanded for its product, and again for the gradient of its input, where it is coded |

Gradients and states are those of A and B only.
"""

from tightfit.jobs.projections import Projection, linear_shapes
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.local_shape import LocalShape
from tightfit.memory.formulas.segments import unsplit_bytes


def low_rank_bytes(shape: LocalShape, *names: Projection) -> int:
    """Saved tensors of the adapters on `names`: A x, and with dropout a mask of one byte per input."""
    if shape.adapted is None:
        return 0
    shapes, rank = linear_shapes(shape.spec), shape.adapted.rank
    inputs = [shapes[name][1] for name in names if name in shape.adapted.projections and name in shapes]
    dropped_bytes = sum(inputs) if shape.adapted.drops else 0
    return shape.tokens * (len(inputs) * rank * shape.element_bytes + dropped_bytes)


def expanded_bytes(shape: LocalShape, name: Projection, result_bytes: int) -> int:
    """A coded matrix dequantized for a product whose result takes `result_bytes`; or, if larger, the adapter's input
    after dropout."""
    shapes, adapted = linear_shapes(shape.spec), shape.adapted
    if adapted is None or name not in shapes:
        return 0
    expanded = adapted.expanded_bytes(*shapes[name], shape.element_bytes, result_bytes)
    drops = adapted.drops and name in adapted.projections
    return max(expanded, shape.tokens * shapes[name][1] * shape.element_bytes if drops else 0)


def frozen_bytes(workload: Workload) -> int:
    """Bytes of the frozen model; 0 without adapters."""
    adapted = workload.adapted
    return 0 if adapted is None else adapted.frozen_bytes(workload.spec, workload.weight_bytes)


def frozen_unsplit_bytes(shape: LocalShape) -> int:
    """Bytes that the allocator counts for the frozen matrices beyond their own (segments.py)."""
    if shape.adapted is None:
        return 0
    spec, scheme = shape.spec, shape.adapted.base.scheme
    matrices = tuple(outputs * inputs for outputs, inputs in linear_shapes(spec).values())
    width = shape.element_bytes if scheme is None else scheme.bits / 8
    ends = (1 if spec.tied else 2) * unsplit_bytes((spec.vocabulary_params,), shape.element_bytes, 1)
    return spec.layers * unsplit_bytes(matrices, width, 1) + ends
