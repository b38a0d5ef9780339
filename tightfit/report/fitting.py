"""What `tightfit train --fit` says before the run, and its plan beside what was measured after it."""

import gc
import sys

import torch

from tightfit.memory.comparison import Comparison, compare
from tightfit.printable import printable
from tightfit.prove.measured_run import MeasuredRun, measure_job
from tightfit.report.ledger import print_comparison
from tightfit.train.fitting import Fitted

MEASURED_STEPS = 2


def print_fit(fitted: Fitted, *, as_json: bool) -> None:
    """A few lines; beside JSON they go to the error stream."""
    for line in fitted.said:
        print(printable(line), file=sys.stderr if as_json else sys.stdout)


def print_fit_beside_run(fitted: Fitted, *, as_json: bool) -> None:
    """The plan's ledger beside that of a few more steps with their memory watched, line by line.

    Watching slows steps, so those of the run itself were not; the same job's next steps take the same memory.
    """
    found, comparison = fit_beside_run(fitted)
    if found.rank or as_json:  # one JSON object has been printed; the ledger is in the run's directory
        return
    assert fitted.plan is not None
    print_comparison(
        comparison, ("the plan", fitted.plan.ledger), (f"{MEASURED_STEPS} steps", found.ledger), as_json=False
    )


def fit_beside_run(fitted: Fitted) -> tuple[MeasuredRun, Comparison]:
    """Measure, keep the ledger with the run, and compare."""
    assert fitted.plan is not None
    gc.collect()  # of the run's model, whose parts refer to each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    found = measure_job(fitted.job, MEASURED_STEPS, quiet=True)
    if not found.rank:
        found.save()
    return found, compare(fitted.plan.ledger, found.ledger)
