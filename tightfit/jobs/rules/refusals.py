"""Who refuses what: levers and layouts by themselves, and a run that tightfit or DeepSpeed does not do.

Each says the sentence of the first rule that is broken, or None.
"""

from typing import TYPE_CHECKING

from tightfit.errors import UserError
from tightfit.jobs.rules.rule import DEEPSPEED_RULES, LAYOUT_RULES, LEVER_RULES, RUN_RULES, Run, first_refusal

if TYPE_CHECKING:
    from tightfit.jobs.layout import Layout
    from tightfit.jobs.levers import Levers
    from tightfit.jobs.workload import Workload


def refused_levers(levers: "Levers") -> str | None:
    """In what levers contradict each other, whatever the model and the machine."""
    return first_refusal(LEVER_RULES, levers)


def refused_layout(layout: "Layout") -> str | None:
    """In what degrees of a layout contradict each other."""
    return first_refusal(LAYOUT_RULES, layout)


def refused_by_trainer(run: Run) -> str | None:
    """Why `tightfit train` does not run `run`, and `tightfit plan` does not plan it."""
    return first_refusal(RUN_RULES, run)


def refused_workload(workload: "Workload", layout: "Layout", levers: "Levers") -> str | None:
    """Why `tightfit train` does not run a workload in this way."""
    if sentence := refused_layout(layout):
        return sentence
    teacher = workload.teacher
    run = Run(
        layout=layout,
        levers=levers,
        precision=workload.precision,
        accumulation=workload.micro_batches(layout),
        spec=workload.spec,
        sequence_length=workload.sequence_length,
        distills=teacher is not None,
        compares_features=teacher is not None and teacher.features + teacher.maps > 0,
        compares_attention=teacher is not None and teacher.maps > 0,
        rounding=workload.rounding,
        adapted=workload.adapted,
        shrinks=workload.shrinks,
    )
    return refused_by_trainer(run)


def refused_by_deepspeed(run: Run) -> str | None:
    """Why DeepSpeed does not run `run`."""
    return first_refusal(DEEPSPEED_RULES, run)


def refuse_untrainable(run: Run) -> None:
    """A sentence as an error where `tightfit train` does not run `run`."""
    if sentence := refused_by_trainer(run):
        raise UserError(sentence)
