"""Teacher: its forward pass of one micro-batch, and the copy of its weights from the host; neither is overlapped."""

from dataclasses import replace

from tightfit.jobs.layout import Layout
from tightfit.plan.seconds.cost_context import CostContext, cost_context
from tightfit.plan.seconds.layer import LayerTime


def teacher_s(ctx: CostContext, layout: Layout) -> float:
    """Seconds of one micro-batch; the elementwise work on a second chunk of logits is not counted."""
    workload, teacher = ctx.workload, ctx.workload.teacher
    if teacher is None:
        return 0.0
    longest = max(teacher.spec.max_positions, workload.sequence_length)
    own = replace(workload, spec=replace(teacher.spec, max_positions=longest), teacher=None)
    layer = LayerTime(cost_context(own, ctx.machine), layout)
    copied_s = teacher.weight_bytes / ctx.machine.host_copy_bytes_s if teacher.place == "host" else 0.0
    return teacher.spec.layers * layer.passes.forward_s + layer.head_forward_s + copied_s
