"""One-GPU note: whether a single card, whose steps are CUDA graphs, would be faster than all of them, as a sentence."""

from dataclasses import replace

from tightfit.jobs.layout import Layout
from tightfit.memory.formulas.training import peak
from tightfit.plan.batch import divisors
from tightfit.plan.cost import Costs
from tightfit.plan.plan import Plan

MOST_ROWS = 64


def one_gpu_note(plan: Plan) -> str | None:
    """Of models so small that several GPUs wait for their hosts; None where they do not."""
    if plan.layout.ranks == 1 or plan.workload.engine_name != "tightfit":
        return None
    one = replace(plan.machine, nodes=1, per_node=1)
    costs = Costs(plan.workload, one)
    layouts = [Layout(micro_batch=rows) for rows in divisors(plan.workload.global_batch) if rows <= MOST_ROWS]
    fitting = [
        layout
        for layout in layouts
        if costs.of(layout).is_captured(plan.levers)
        and peak(plan.workload, layout, plan.levers)[0] <= one.accelerator.memory_bytes
    ]
    alone_s = min((costs.step(layout, plan.levers).step_s for layout in fitting), default=None)
    if alone_s is None or alone_s >= plan.step_seconds:
        return None
    return (
        f"one GPU alone would take {1e3 * alone_s:.0f} ms a step, with all its kernels in a CUDA graph; "
        f"{plan.layout.ranks} take {1e3 * plan.step_seconds:.0f} ms, as their hosts launch kernels one by one"
    )
