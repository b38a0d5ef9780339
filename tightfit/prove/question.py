"""What `tightfit check` is asked about, read without torch: a mistake in a job or plan is told at once."""

from collections.abc import Sequence
from pathlib import Path

from tightfit.jobs.job import Job
from tightfit.plan.job import PLAN_SUFFIX, read_job
from tightfit.plan.plan import Plan

NOTHING_TRAINED = ("data.train=nothing", "output=nowhere")
"""Required fields of a job that a check does not use, and that a plan may leave open."""


def read_question(path: Path, overrides: Sequence[str] = ()) -> Job | Plan:
    """The plan at `path` as it is, or the job that the overrides make of it; or the job of a job file or run."""
    if path.suffix.lower() != PLAN_SUFFIX or path.is_dir():
        return read_job(path, overrides)[0]
    return read_job(path, [*NOTHING_TRAINED, *overrides], steps=1)[0] if overrides else Plan.load(path)
