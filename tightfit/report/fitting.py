"""What `tightfit train --fit` prints: the chosen plan before the run, predicted and measured memory after it."""

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
    """Print the lines about the fit; to stderr where stdout has JSON."""
    for line in fitted.lines:
        print(printable(line), file=sys.stderr if as_json else sys.stdout)


def print_fit_beside_run(fitted: Fitted, *, as_json: bool) -> None:
    """Print the plan's ledger beside that of MEASURED_STEPS further steps, line by line.

    Measuring slows steps, so the run's own steps are not measured; further steps take the same memory.
    """
    found, comparison = fit_beside_run(fitted)
    if found.rank or as_json:  # one JSON object has been printed; the ledger is in the run's directory
        return
    assert fitted.plan is not None
    print_comparison(
        comparison, ("the plan", fitted.plan.ledger), (f"{MEASURED_STEPS} steps", found.ledger), as_json=False
    )


def fit_beside_run(fitted: Fitted) -> tuple[MeasuredRun, Comparison]:
    """Measure further steps, save their ledger in the run's directory, and compare it with the plan's."""
    assert fitted.plan is not None
    gc.collect()  # the run's model has reference cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    found = measure_job(fitted.job, MEASURED_STEPS, quiet=True)
    if not found.rank:
        found.save()
    return found, compare(fitted.plan.ledger, found.ledger)
