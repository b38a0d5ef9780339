"""Settings that a step's CUDA graph does not go with: all that make the host decide or copy between kernels."""

from typing import TYPE_CHECKING

from tightfit.jobs.lever_table import asking_host
from tightfit.jobs.rules.rule import RUN_RULES, Run, rule

if TYPE_CHECKING:
    from tightfit.jobs.layout import Layout
    from tightfit.jobs.levers import Levers
    from tightfit.jobs.workload import Workload


def uncaptured_because(run: Run) -> str | None:
    """The reason why a step cannot be captured as a CUDA graph; None where it can."""
    if run.layout.ranks > 1:
        return f"{run.layout.ranks} ranks, which exchange messages between kernels"
    if name := asking_host(run.levers):
        return f"levers.{name}, for which the host copies or looks between kernels"
    if run.distills:
        return "distill.teacher"
    if run.adapted is not None and run.adapted.drops:
        return "adapter.dropout, which draws anew in every step"
    return None


@rule(RUN_RULES, "levers.cuda_graph")
def what_the_host_does_is_not_captured(run: Run) -> str | None:
    if run.levers.cuda_graph == "always" and (because := uncaptured_because(run)):
        return f"levers.cuda_graph is always, which does not go with {because}; set it to auto"
    return None


def may_capture(workload: "Workload", layout: "Layout", levers: "Levers") -> bool:
    """Whether the step of a workload can be captured, and `levers.cuda_graph` does not forbid it."""
    if levers.cuda_graph == "never":
        return False
    has_teacher = workload.teacher is not None
    return uncaptured_because(Run(layout=layout, levers=levers, distills=has_teacher, adapted=workload.adapted)) is None
