"""Who refuses a run, tightfit (to plan or to train it) or DeepSpeed: the sentence of the first rule it breaks."""

from tightfit.errors import UserError
from tightfit.jobs.rules import distillation as distillation  # enters its rules into RUN_RULES
from tightfit.jobs.rules import quantize as quantize
from tightfit.jobs.rules.deepspeed import DEEPSPEED_RULES
from tightfit.jobs.rules.rule import Run, first_refusal
from tightfit.jobs.rules.run import RUN_RULES


def refused_by_trainer(run: Run) -> str | None:
    """Why `tightfit train` does not run `run`, and `tightfit plan` does not plan it; None where they do."""
    return first_refusal(RUN_RULES, run)


def refused_by_deepspeed(run: Run) -> str | None:
    """Why DeepSpeed does not run `run`; None where it does."""
    return first_refusal(DEEPSPEED_RULES, run)


def refuse_untrainable(run: Run) -> None:
    """A sentence as an error where `tightfit train` does not run `run`."""
    if sentence := refused_by_trainer(run):
        raise UserError(sentence)
