"""`tightfit check`: many ranks against one."""

from pathlib import Path
from typing import Annotated

import typer

from tightfit.cli.options import Override


def check(
    job: Annotated[Path, typer.Argument(help="A plan (JSON), a job file (YAML) or the directory of a run.")],
    override: Override = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to compare.")] = 2,
    tiny: Annotated[
        bool | None,
        typer.Option("--tiny/--whole", help="A miniature of the model, or all of it; tiny unless it is small already."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as one JSON object.")] = False,
) -> None:
    """Train a few steps on all ranks of a layout and on one process, and say where they first differ.

    Losses, gradient norms, every gradient and every weight are compared in float32. Without torchrun the processes are
    started here, on this machine's GPUs or CPU. Exit code 0: the same; 1: they differ.

    \b
    tightfit check plan.json
    tightfit check job.yaml -o layout.tensor=2 -o layout.data=2
    torchrun --nproc-per-node=8 -m tightfit check plan.json --whole
    """
    from tightfit.prove.question import read_question

    asked = read_question(job, override or [])  # before torch, whose import takes seconds

    from tightfit.prove.check_target import target_of
    from tightfit.prove.equivalence_check import check as compared
    from tightfit.report.check import print_verdict
    from tightfit.report.waiting import waiting

    with waiting("comparing all ranks with one process"):
        verdict, subject = compared(target_of(asked), str(job), steps=steps, tiny=tiny)
    if verdict is None:
        return
    print_verdict(verdict, subject, as_json=as_json)
    if not verdict.same:
        raise typer.Exit(1)
