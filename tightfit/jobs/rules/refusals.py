"""Checking rules: of levers or a layout alone, and of a run by tightfit or by DeepSpeed.

Each function returns the sentence of the first rule that refuses, or None.
"""

from functools import cache
from typing import TYPE_CHECKING

from tightfit.errors import UserError
from tightfit.jobs.rules.rule import (
    DEEPSPEED_RULES,
    EXTRAS,
    LAYOUT_RULES,
    LEVER_RULES,
    RUN_RULES,
    Rule,
    Run,
    first_refusal,
)

if TYPE_CHECKING:
    from tightfit.jobs.layout import Layout
    from tightfit.jobs.levers import Levers
    from tightfit.jobs.workload import Workload


def refused_levers(levers: "Levers") -> str | None:
    """Why the levers contradict each other, whatever the model and the machine."""
    return first_refusal(LEVER_RULES, levers)


def refused_layout(layout: "Layout") -> str | None:
    """Why the fields of a layout contradict each other."""
    return first_refusal(LAYOUT_RULES, layout)


def refused_by_trainer(run: Run) -> str | None:
    """Why `tightfit train` does not run `run`, and `tightfit plan` does not plan it."""
    return first_refusal(run_rules(run.extras), run)


@cache
def run_rules(extras: frozenset[str], *, of_levers: bool = False) -> tuple[Rule[Run], ...]:
    """The RUN_RULES that can apply to a run with these EXTRAS; `of_levers`: only rules that concern levers."""
    others = frozenset(EXTRAS) - extras
    relevant = (each for each in RUN_RULES if each.sections & extras or not each.sections & others)
    return tuple(each for each in relevant if not of_levers or "levers" in each.sections)


def refused_workload(workload: "Workload", layout: "Layout", levers: "Levers") -> str | None:
    """Why `tightfit train` does not run a workload in this way."""
    return refused_layout(layout) or refused_by_trainer(_run_of(workload, layout, levers))


def refused_beside(workload: "Workload", layout: "Layout", levers: "Levers") -> str | None:
    """The same for a layout that is allowed without levers: only the rules that concern levers are checked."""
    run = _run_of(workload, layout, levers)
    return first_refusal(run_rules(run.extras, of_levers=True), run)


def _run_of(workload: "Workload", layout: "Layout", levers: "Levers") -> Run:
    teacher = workload.teacher
    return Run(
        layout=layout,
        levers=levers,
        precision=workload.precision,
        accumulation=workload.micro_batches(layout),
        spec=workload.spec,
        sequence_length=workload.sequence_length,
        distills=teacher is not None,
        compares_features=teacher is not None and teacher.features + teacher.maps > 0,
        rounding=workload.rounding,
        adapted=workload.adapted,
        shrinks=workload.shrinks,
        keeps_zeros=workload.keeps_zeros,
    )


def refused_by_deepspeed(run: Run) -> str | None:
    """Why DeepSpeed does not run `run`."""
    return first_refusal(DEEPSPEED_RULES, run)


def refuse_untrainable(run: Run) -> None:
    """Raise a UserError if `tightfit train` does not run `run`."""
    if sentence := refused_by_trainer(run):
        raise UserError(sentence)
