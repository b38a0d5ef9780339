"""Mesh note: whether as many tensor ranks would wait less in a line or on another mesh, as a sentence of a plan."""

from collections.abc import Iterator

from tightfit.jobs.layout import Layout
from tightfit.jobs.rules.refusals import refused_by_trainer, refused_layout
from tightfit.jobs.rules.rule import Run
from tightfit.memory.formulas.training import peak
from tightfit.plan.cost import Costs
from tightfit.plan.describe import describe_mesh
from tightfit.plan.plan import Plan

FEWEST_RANKS = 4


def mesh_note(plan: Plan) -> str | None:
    """What tensor ranks wait a step, and the least they would if they stood otherwise; None with nothing to compare."""
    if plan.layout.tensor < FEWEST_RANKS or plan.workload.engine_name != "tightfit":
        return None
    costs = Costs(plan.workload, plan.machine)

    def waits_s(layout: Layout) -> float:
        return costs.step(layout, plan.levers).tensor_s

    others = sorted(_others(plan), key=waits_s)
    if not others:
        return None
    own_s, best_s = waits_s(plan.layout), waits_s(others[0])
    own, best = describe_mesh(plan.layout), describe_mesh(others[0])
    verb = "would wait" if best_s < own_s else "would not wait less:"
    return f"{plan.layout.tensor} tensor ranks wait {own_s:.2f} s a step {own}; {best} they {verb} {best_s:.2f} s"


def _others(plan: Plan) -> Iterator[Layout]:
    """The same ranks in a line, or on every mesh that the rulebook lets this plan have and that the card holds."""
    tensor, levers, workload = plan.layout.tensor, plan.levers, plan.workload
    for kind in ("1d", "2d", "2.5d", "3d"):
        for depth in range(2, tensor + 1) if kind == "2.5d" else (1,):
            layout = plan.layout.model_copy(update={"tensor_mesh": kind, "tensor_depth": depth})
            run = Run(layout=layout, levers=levers, spec=workload.spec, sequence_length=workload.sequence_length)
            refused = refused_layout(layout) or refused_by_trainer(run)
            if layout != plan.layout and not refused and _fits(plan, layout):
                yield layout


def _fits(plan: Plan, layout: Layout) -> bool:
    return peak(plan.workload, layout, plan.levers)[0] <= plan.machine.accelerator.memory_bytes
