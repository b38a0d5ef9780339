"""The update's time on the card: the bytes that AdamW and the adding of gradients move, and what kernels reach of them.

As train/optimizer.py goes about it. Gradients are read for their norm. Torch's AdamW beside masters wants them widened
(read and written) and its result narrowed (read and written); it reads and writes gradients (scaled in it), what it
updates, and both moments. Shards are masters already: nothing is widened or narrowed. Our kernels read gradients as
they are, and write a narrow copy where there is one. The factored update is made of single operations, each of which
reads and writes float32 numbers. States on the host are updated beside the link, which takes far longer. Updates inside
backward move less than torch's, but take the slack with which the host is ahead of the card: counted as much.
"""

from tightfit.hardware.efficiency import Efficiency
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.state_format import moment_bytes, state_format
from tightfit.jobs.workload import Workload

WIDE_BYTES = 4


def moved_bytes(workload: Workload, layout: Layout, levers: Levers) -> float:
    """Of one weight that a rank updates, its gradient's norm included."""
    width = workload.weight_bytes
    kept = WIDE_BYTES if workload.has_masters and layout.zero else width
    if levers.offload != "none":
        return kept
    updated = WIDE_BYTES if workload.has_masters else width
    copies = workload.has_masters and not layout.zero
    moments = 2 * moment_bytes(levers, wide=workload.updates_wide)
    if _counts_as_torch(levers, wide=workload.updates_wide):
        return kept + (2 * (width + WIDE_BYTES) if copies else 0) + 4 * updated + moments
    moved = 2 * kept + (width if copies else 0) + 2 * updated + moments
    if state_format(levers, wide=workload.updates_wide) == "factored":
        moved += _between_bytes(kept, updated)
    return moved


def _between_bytes(kept: int, updated: int) -> int:
    """Of one weight, between the operations of levers/optimizer_states.py: what a single kernel would not move.

    The gradient is read twice more, for norms of rows and columns; it is widened (w) and multiplied by the clipping
    factor (rw); the first moment is widened (w), decayed (rw), added to (rwr) and narrowed (r); √v is made (w) and
    finished in two steps (rw, rw); the weight is decayed (w) and changed (rwrr); what is written to the model, read.
    """
    wide_passes = 1 + 2 + 1 + 2 + 3 + 1 + 1 + 4 + 1 + 4 + 1
    return 2 * kept + wide_passes * WIDE_BYTES + (updated if updated == WIDE_BYTES else 0)


def added_bytes(workload: Workload, layout: Layout) -> float:
    """Of one weight and further micro-batch: its gradient read, and added to the sum."""
    width = workload.weight_bytes
    kept = WIDE_BYTES if workload.has_masters and layout.zero else width
    return width + 2 * kept


def update_share(levers: Levers, efficiency: Efficiency, *, wide: bool) -> float:
    """What the update reaches of a copy's bandwidth."""
    form = state_format(levers, wide=wide)
    return dict(efficiency.updates).get(f"torch {form}" if _counts_as_torch(levers, wide=wide) else form, 1.0)


def _counts_as_torch(levers: Levers, *, wide: bool) -> bool:
    plain = levers.rounding == "nearest" and levers.offload == "none"
    return plain and state_format(levers, wide=wide) == ("fp32" if wide else "bf16")
