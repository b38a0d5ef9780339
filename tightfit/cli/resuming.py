"""`--resume` and `--resume=auto`: a flag that may be given a value, for the verbs that train.

An option with an optional value would take the word after it (`--resume runs/mine`) for that value; so `--resume=auto`
is read as the flag `--resume-auto`.
"""

from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

Resume = Annotated[
    bool, typer.Option("--resume", help="Continue from the run's newest checkpoint; --resume=auto begins without one.")
]
ResumeAuto = Annotated[bool, typer.Option("--resume-auto", hidden=True)]
From = Annotated[
    str | None,
    typer.Option(
        "--from", metavar="CHECKPOINT", help="Continue from this checkpoint (step-00000200); later ones move aside."
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Start anew where the output holds a run, which goes once this one saves.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything and say what would run, or why not; nothing is trained.")
]


class ResumingCommand(TyperCommand):
    """A verb with these options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """With `--resume=auto` as the flag it stands for."""
        return super().parse_args(ctx, ["--resume-auto" if arg == "--resume=auto" else arg for arg in args])


def start_words(resume: bool, resume_auto: bool, checkpoint: str | None, overwrite: bool) -> list[str]:
    """These options as words of a command line."""
    words = ["--resume-auto"] if resume_auto else ["--resume"] if resume else []
    return [*words, *([] if checkpoint is None else ["--from", checkpoint]), *(["--overwrite"] if overwrite else [])]


def resuming(resume: bool, resume_auto: bool) -> bool | Literal["auto"]:
    """What `run_job` calls it."""
    return "auto" if resume_auto else resume
