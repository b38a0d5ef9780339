"""`tightfit launch`: a job's processes on this machine, or the line that starts them on several."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tightfit.cli.options import Override
from tightfit.cli.resuming import DryRun, From, Overwrite, Resume, ResumeAuto, resuming, start_words
from tightfit.cli.train import show_dry_run, train_as_rank

if TYPE_CHECKING:
    from tightfit.jobs.job import Job


def launch(
    job: Annotated[Path, typer.Argument(help="A job file (YAML), a plan (JSON) or the directory of a run.")],
    override: Override = None,
    resume: Resume = False,
    resume_auto: ResumeAuto = False,
    checkpoint: From = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    restarts: Annotated[
        int, typer.Option(min=0, help="Start all ranks again, from the newest checkpoint, when one dies.")
    ] = 0,
    check: Annotated[
        bool, typer.Option("--check", help="First compare the ranks with one process, as `tightfit check` does.")
    ] = False,
    nodes: Annotated[int, typer.Option(min=1, help="Only print the line to run on each of so many machines.")] = 1,
    head: Annotated[str, typer.Option(help="The machine at which they meet.")] = "HOST",
) -> None:
    """Start one process per rank of a job on this machine: on its GPUs, or on the CPU.

    SIGINT, SIGTERM or SIGHUP stops all ranks after their step, with a checkpoint. Exit codes: 2 when a rank died or a
    mistake was given, 1 when a check finds a difference, 130, 143 or 129 when stopped.

    \b
    tightfit launch job.yaml -o layout.data=2
    tightfit launch job.yaml --check                      only if its ranks train as one process does
    tightfit launch plan.json --restarts 3
    tightfit launch job.yaml --nodes 2 --head node-1      prints the torchrun line
    """
    from tightfit.plan.job import read_job

    overrides = override or []
    loaded, _ = read_job(job, overrides)
    if dry_run:
        begin = {"resume": resuming(resume, resume_auto), "overwrite": overwrite, "checkpoint": checkpoint}
        return show_dry_run(loaded, begin, as_json=False)
    changes = [word for text in overrides for word in ("-o", text)]
    arguments = [str(job), *changes]
    start_options = start_words(resume, resume_auto, checkpoint, overwrite)

    from tightfit.launch.forked import TRAINING, start_server

    if nodes == 1:
        start_server(TRAINING)  # which imports while we do

    from tightfit.launch.launcher import launch as start
    from tightfit.launch.launcher import torchrun_line

    if nodes > 1:
        return typer.echo(torchrun_line(loaded.layout.ranks, nodes, head, [*arguments, *start_options]))
    if check:
        require_same(loaded, str(job))
    if (stopped_by := start(loaded, arguments, start_options, restarts, train_as_rank)) is not None:
        raise typer.Exit(128 + stopped_by)


def require_same(job: "Job", source: str) -> None:
    """End here where the job's ranks do not train as one process does."""
    from tightfit.prove.check_target import target_of
    from tightfit.prove.equivalence_check import check
    from tightfit.report.check import print_verdict
    from tightfit.report.waiting import waiting

    with waiting("comparing all ranks with one process"):
        verdict, subject = check(target_of(job), source)
    if verdict is None:
        return
    print_verdict(verdict, subject, as_json=False)
    if not verdict.same:
        raise typer.Exit(1)
