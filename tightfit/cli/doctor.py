"""`tightfit doctor`: is this machine with several GPUs well?"""

from typing import Annotated

import typer

from tightfit.cli.options import AsJson


def doctor(
    ranks: Annotated[int | None, typer.Option(min=2, max=64, help="Processes; one per GPU unless told.")] = None,
    limit_s: Annotated[float, typer.Option("--limit", min=10, help="Seconds that it may take.")] = 290,
    as_json: AsJson = False,
) -> None:
    """Check NCCL, links and every split that fits this machine's GPUs, and measure collectives, in five minutes.

    Every way of splitting is compared with one process, as `tightfit check` does. What was measured is kept, and
    `tightfit plan --on local` counts with it. Exit code 0: healthy; 1: something is wrong, and the last line names it.

    \b
    tightfit doctor
    tightfit doctor --ranks 4        on CPU processes where there are fewer GPUs
    """
    from tightfit.prove.doctor import run_doctor
    from tightfit.report.doctor import print_diagnosis
    from tightfit.report.waiting import waiting

    with waiting("examining all ranks of this machine"):
        diagnosis = run_doctor(ranks, limit_s=limit_s)
    print_diagnosis(diagnosis, as_json=as_json)
    if not diagnosis.healthy:
        raise typer.Exit(1)
