"""`tightfit train`: run a job."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tightfit.cli.options import refuse_given, takes_options
from tightfit.cli.resuming import PASSED_OVER, StartOptions

if TYPE_CHECKING:
    from tightfit.jobs.job import Job
    from tightfit.plan.plan import Plan
    from tightfit.train.fitting import Fitted


def train_as_rank(arguments: list[str]) -> None:
    """`tightfit train ARGUMENTS` in a process that was started for it; mistakes are raised, not printed."""
    from tightfit.cli.main import app

    if code := app(["train", *arguments], standalone_mode=False):
        raise SystemExit(code)


@dataclass(frozen=True, kw_only=True)
class TrainOptions(StartOptions):
    """The arguments and options of `tightfit train`."""

    job: Annotated[
        Path | None,
        typer.Argument(
            help="A job file (YAML), a plan (JSON) or the directory of a run; none trains the embedded example."
        ),
    ] = None
    stop_after: Annotated[
        int | None, typer.Option(min=1, help="Save and stop after this step; the schedule still spans all steps.")
    ] = None
    fit: Annotated[
        bool, typer.Option("--fit", help="Choose the fastest levers that fit this machine, and say why.")
    ] = False
    memory: Annotated[
        str | None, typer.Option(help="Use the GPU as if it had only this much memory: 24GB.", show_default=False)
    ] = None
    fields: Annotated[bool, typer.Option("--fields", help="List every field of a job file with its meaning.")] = False
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the result (or the fields) as one JSON object."),
    ] = False


@takes_options
def train(options: TrainOptions) -> None:
    """Train a model as a job file says, and show how it went.

    A job names a model, data and an output directory; everything else has a default. Without one, a small
    Llama-style model learns from the text of Python's own standard library.

    \b
    tightfit train                                   the embedded example
    tightfit train job.yaml -o steps=500             a job of yours, with a change
    tightfit train job.yaml --fit                    with the levers that fit this GPU
    tightfit train runs/mine --resume                go on where it stopped
    tightfit train job.yaml --resume=auto            the same, or begin where there is no checkpoint yet
    tightfit train job.yaml --dry-run                check everything, start nothing
    tightfit train plan.json -o data.train=notes -o output=runs/mine -o steps=500
                                                     what `tightfit plan --save` found
    \b
    Exit codes: 2 for a mistake in what was given, 3 when the GPU ran out of memory, 130, 143 or 129 when stopped.
    """
    if options.fields:
        from tightfit.jobs.fields import field_rows
        from tightfit.report.tables import print_fields

        names = tuple(field.name for field in fields(options) if field.name not in ("fields", "as_json"))
        refuse_given(options, names, "but --fields only lists what a job may have; leave one of them out")
        return print_fields(list(field_rows()), as_json=options.as_json)
    from tightfit.jobs.load import default_job
    from tightfit.plan.job import read_job

    overrides = options.overrides
    job, plan = (default_job(overrides), None) if options.job is None else read_job(options.job, overrides)
    if options.dry_run:
        refuse_given(options, ("stop_after",), PASSED_OVER)
        _memory_bytes(options)
        return show_dry_run(job.model_copy(update={"fit": options.fit or job.fit}), options.start, options.as_json)
    _run(job, plan, options)


def _run(job: "Job", plan: "Plan | None", options: TrainOptions) -> None:
    """Train, and show the result beside what was predicted."""
    from tightfit.report.fitting import print_fit, print_fit_beside_run
    from tightfit.report.out_of_memory import print_shortage
    from tightfit.report.prediction import prediction
    from tightfit.report.run import print_result
    from tightfit.train.loop import run_job
    from tightfit.train.out_of_memory import EXIT_CODE, RunOutOfMemoryError

    fitted = _fitted(job, options)
    if fitted is not None:
        job, plan = fitted.job, fitted.plan or plan
        print_fit(fitted, as_json=options.as_json)
    try:
        result = run_job(job, stop_after=options.stop_after, quiet=options.as_json, **options.start)
    except RunOutOfMemoryError as error:
        print_shortage(error.shortage)
        raise typer.Exit(EXIT_CODE) from None
    if result.rank == 0:
        predicted = None if plan is None else prediction(plan, job, result)
        print_result(result, job, as_json=options.as_json, prediction=predicted)
    if result.stopped_by is not None:
        raise typer.Exit(128 + result.stopped_by)
    if fitted is not None and fitted.plan is not None:
        print_fit_beside_run(fitted, as_json=options.as_json)


def _fitted(job: "Job", options: TrainOptions) -> "Fitted | None":
    """The job with levers that fit this machine, or the memory that the options leave of it; None if not asked for."""
    from tightfit.train.fitting import cap_memory, fit_job

    cap_bytes = _memory_bytes(options)
    if cap_bytes is not None:
        cap_memory(cap_bytes)
    return fit_job(job, cap_bytes) if options.fit or job.fit else None


def _memory_bytes(options: TrainOptions) -> int | None:
    from tightfit.hardware.sizes import parse_bytes

    return None if options.memory is None else parse_bytes(options.memory, "--memory")


def show_dry_run(job: "Job", start: dict[str, Any], as_json: bool = False) -> None:
    """Print what would run, for `train` and `launch`."""
    from tightfit.report.dry_run import print_dry_run
    from tightfit.train.dry_run import dry_run

    print_dry_run(dry_run(job, quiet=as_json, **start), as_json=as_json)
