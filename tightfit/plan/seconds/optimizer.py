"""The update on the card: bytes moved by AdamW and by summing gradients, over the share of copy bandwidth they reach.

As in train/optimizer. Gradients are read for their norm. Torch's AdamW (on GPUs one launch of our kernel over lists)
reads gradients, and reads and writes the updated weights and both moments. With masters, gradients are first cast to
float32 and the result is cast back (each read and written); FSDP2's shards are masters already, so nothing is cast. Our
other kernels read gradients as they are, and also write the 16-bit copy of a master. The factored update is a series of
torch operations, each of which reads and writes float32 numbers. Updates of states on the host are not counted: they
overlap with their copies, which take far longer.
"""

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.precision import FLOAT32_BYTES
from tightfit.jobs.state_format import is_torch_adamw, moment_bytes, state_format
from tightfit.jobs.workload import Workload
from tightfit.levers.policy.offload import offloads_states
from tightfit.plan.seconds.cost_context import CostContext
from tightfit.plan.seconds.parameters import RankParams

FACTORED_PASSES = {
    "gradient widened": 1,
    "gradient multiplied by the clipping factor": 2,
    "first moment widened": 1,
    "first moment decayed": 2,
    "gradient added to the first moment": 3,
    "first moment narrowed": 1,
    "root of the second moment made": 1,
    "root finished in two steps": 4,
    "weight decayed": 1,
    "weight changed": 4,
    "weight read to be written to the model": 1,
}
"""Float32 numbers read and written per weight by the operations of levers/optimizer_states.py."""


def update_s(ctx: CostContext, layout: Layout, levers: Levers, params: RankParams, *, micro_batches: int) -> float:
    """The card's seconds of summing gradients over a step's micro-batches, and of AdamW."""
    workload = ctx.workload
    summed_params = params.owned if layout.zero >= 2 else params.all
    # For each micro-batch but the first: the gradient is read, the sum read and written.
    sum_bytes = workload.weight_bytes + 2 * _gradient_bytes(workload, layout)
    added_bytes = 0 if workload.engine.fuses_accumulation else (micro_batches - 1) * summed_params * sum_bytes
    update_bytes = params.owned * moved_bytes(workload, layout, levers)
    reached_share = _reached_share(ctx, levers)
    return (added_bytes + update_bytes / reached_share) / ctx.rates.bytes_s


def moved_bytes(workload: Workload, layout: Layout, levers: Levers) -> float:
    """Bytes moved per weight that a rank updates, with its gradient read for the norm."""
    wide = workload.updates_wide
    gradient = _gradient_bytes(workload, layout)
    if offloads_states(levers):
        return gradient
    weight, updated = workload.weight_bytes, workload.updated_bytes
    has_copy = workload.has_masters and not layout.zero
    moments = 2 * moment_bytes(levers, wide=wide)
    if is_torch_adamw(levers, wide=wide):
        widened_narrowed = 2 * (weight + FLOAT32_BYTES) if has_copy else 0
        return gradient + widened_narrowed + 3 * updated + moments
    moved = 2 * gradient + (weight if has_copy else 0) + 2 * updated + moments
    if state_format(levers, wide=wide) == "factored":
        moved += _between_operations_bytes(gradient, updated)
    return moved


def _gradient_bytes(workload: Workload, layout: Layout) -> int:
    """Bytes of a gradient that the update reads: float32 with masters under FSDP2."""
    return workload.updated_bytes if layout.zero else workload.weight_bytes


def _between_operations_bytes(gradient: int, updated: int) -> int:
    """Bytes per weight between the operations of a factored update, which a single kernel would not move."""
    norms = 2 * gradient  # read again for the norms of rows and columns
    return norms + sum(FACTORED_PASSES.values()) * FLOAT32_BYTES + (updated if updated == FLOAT32_BYTES else 0)


def _reached_share(ctx: CostContext, levers: Levers) -> float:
    """Share of a copy's bandwidth that the update reaches."""
    wide = ctx.workload.updates_wide
    form: str = state_format(levers, wide=wide)
    if is_torch_adamw(levers, wide=wide):
        form = f"torch {form}"
    elif levers.update_in_backward and form not in ("8bit", "factored"):
        form = "inside backward"
    return dict(ctx.efficiency.updates).get(form, 1.0)
