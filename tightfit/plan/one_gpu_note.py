"""One-GPU note: whether a single card, whose steps are CUDA graphs, would be faster than all of them, as a sentence."""

from dataclasses import replace

from tightfit.errors import UserError
from tightfit.jobs.layout import Layout
from tightfit.memory.formulas.training import peak
from tightfit.plan.cost import Costs
from tightfit.plan.plan import Plan
from tightfit.plan.space import LARGEST_MICRO_BATCH


def one_gpu_note(plan: Plan) -> str | None:
    """Of models so small that several GPUs wait for their hosts; None where they do not."""
    if plan.layout.ranks == 1 or plan.workload.engine_name != "tightfit":
        return None
    one = replace(plan.machine, nodes=1, per_node=1)
    costs = Costs(plan.workload, one)
    sizes = [rows for rows in range(1, LARGEST_MICRO_BATCH + 1) if plan.workload.global_batch % rows == 0]
    taken = [_captured_s(plan, costs, Layout(micro_batch=rows)) for rows in sizes]
    alone_s = min((seconds for seconds in taken if seconds is not None), default=None)
    if alone_s is None or alone_s >= plan.step_seconds:
        return None
    return (
        f"one GPU alone would take {1e3 * alone_s:.0f} ms a step, with all its kernels in a CUDA graph; "
        f"{plan.layout.ranks} take {1e3 * plan.step_seconds:.0f} ms, as their hosts launch kernels one by one"
    )


def _captured_s(plan: Plan, costs: Costs, layout: Layout) -> float | None:
    """Seconds of the plan's step on one card; None where it is no graph or does not fit, with these levers."""
    try:
        captured = costs.of(layout).is_captured(plan.levers)
        fits = peak(plan.workload, layout, plan.levers)[0] <= costs.machine.accelerator.memory_bytes
    except UserError:  # a budget of activations that is too small for one card
        return None
    return costs.step(layout, plan.levers).step_s if captured and fits else None
