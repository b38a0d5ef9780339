"""`tightfit launch`: a job's processes on this machine, or the line that starts them on several."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tightfit.cli.options import refuse_given, takes_options
from tightfit.cli.resuming import PASSED_OVER, StartOptions
from tightfit.cli.train import show_dry_run, train_as_rank

if TYPE_CHECKING:
    from tightfit.jobs.job import Job


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(StartOptions):
    """The arguments and options of `tightfit launch`."""

    job: Annotated[Path, typer.Argument(help="A job file (YAML), a plan (JSON) or the directory of a run.")]
    restarts: Annotated[
        int, typer.Option(min=0, help="Start all ranks again, from the newest checkpoint, when one dies.")
    ] = 0
    check: Annotated[
        bool, typer.Option("--check", help="First compare the ranks with one process, as `tightfit check` does.")
    ] = False
    nodes: Annotated[int, typer.Option(min=1, help="Only print the line to run on each of so many machines.")] = 1
    head: Annotated[str, typer.Option(help="The machine at which they meet.")] = "HOST"


@takes_options
def launch(options: LaunchOptions) -> None:
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

    job, _ = read_job(options.job, options.overrides)
    if options.dry_run:
        refuse_given(options, ("restarts", "check", "nodes", "head"), PASSED_OVER)
        return show_dry_run(job, options.start)
    changes = [word for text in options.overrides for word in ("-o", text)]
    arguments = [str(options.job), *changes]

    from tightfit.launch.forked import TRAINING, start_server

    if options.nodes == 1:
        refuse_given(options, ("head",), "where several machines meet; add --nodes or leave it out")
        start_server(TRAINING)  # imports its modules while this process does

    from tightfit.launch.launcher import launch as start
    from tightfit.launch.launcher import torchrun_line

    if options.nodes > 1:
        refuse_given(options, ("restarts", "check"), "but --nodes only prints the line; leave one of them out")
        words = [*arguments, *options.start_words]
        return typer.echo(torchrun_line(job.layout.ranks, options.nodes, options.head, words))
    if options.check:
        require_same(job, str(options.job))
    stopped_by = start(job, arguments, options.start_words, options.restarts, train_as_rank)
    if stopped_by is not None:
        raise typer.Exit(128 + stopped_by)


def require_same(job: "Job", source: str) -> None:
    """Exit with code 1 if the job's ranks do not train as one process does."""
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
