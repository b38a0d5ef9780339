"""`tightfit measure`: a few steps of a job with its memory watched."""

from pathlib import Path
from typing import Annotated

import typer

from tightfit.cli.options import Override


def measure(
    job: Annotated[
        Path | None,
        typer.Argument(help="A job file (YAML), a plan (JSON) or the directory of a run; none: the embedded example."),
    ] = None,
    override: Override = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to run.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print the ledger as one JSON object.")] = False,
) -> None:
    """Run a few steps of a job and say what was in memory, by phase and component.

    Writes ledger.json and memory.png (memory over the last step) into the job's output directory, and no checkpoint.

    \b
    tightfit measure job.yaml
    tightfit measure plan.json -o data.train=notes -o output=runs/mine
    """
    from tightfit.jobs.load import default_job
    from tightfit.plan.job import read_job

    loaded = default_job(override or []) if job is None else read_job(job, override or [], steps=steps)[0]

    from tightfit.cli.outputs import is_ledger, is_picture, refuse_foreign

    refuse_foreign(loaded.output / "ledger.json", is_ledger, "a ledger")
    refuse_foreign(loaded.output / "memory.png", is_picture, "a picture")

    from tightfit.prove.measured_run import measure_job
    from tightfit.report.ledger import print_measured
    from tightfit.report.timeline import draw_timelines, of_measurement

    found = measure_job(loaded, steps, quiet=as_json)
    if found.rank:
        return
    file, picture = found.save(), found.run / "memory.png"
    title = f"{loaded.model.source}, step {steps} of {steps}, {found.precision}, {found.device}"
    draw_timelines({"": of_measurement(found.measuring)}, title, picture)
    print_measured(found, file, picture, as_json=as_json)
