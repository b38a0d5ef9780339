"""How a run begins, for the verbs that train: with which fields changed, and anew or where it stopped.

`--resume` may be given a value. An option with an optional value would take the word after it (`--resume runs/mine`)
for that value; so `--resume=auto` is read as the flag `--resume-auto`.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from tightfit.cli.options import Override
from tightfit.errors import UserError

PASSED_OVER = "but --dry-run starts nothing; leave one of them out"
"""Why options that say how processes run are refused with --dry-run."""


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """The options that `train` and `launch` share."""

    override: Override = None
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue from the run's newest checkpoint; --resume=auto begins without one."),
    ] = False
    resume_auto: Annotated[bool, typer.Option("--resume-auto", hidden=True)] = False
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="CHECKPOINT", help="Continue from this checkpoint (step-00000200); later ones move aside."
        ),
    ] = None
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Start anew where the output holds a run, which goes once this one saves."),
    ] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and say what would run, or why not; nothing is trained.")
    ] = False

    @property
    def overrides(self) -> list[str]:
        """Changes to fields of the job."""
        return self.override or []

    @property
    def start(self) -> dict[str, Any]:
        """The options as arguments of `run_job`."""
        resume = "auto" if self.resume_auto else self.resume
        return {"resume": resume, "overwrite": self.overwrite, "checkpoint": self.checkpoint}

    @property
    def start_words(self) -> list[str]:
        """The options as words of a command line."""
        words = ["--resume-auto"] if self.resume_auto else ["--resume"] if self.resume else []
        words += [] if self.checkpoint is None else ["--from", self.checkpoint]
        return words + (["--overwrite"] if self.overwrite else [])


class ResumingCommand(TyperCommand):
    """A verb with `StartOptions`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read `--resume=auto` as the flag `--resume-auto`."""
        for arg in args:
            if arg.startswith("--resume=") and arg != "--resume=auto":
                value = arg.partition("=")[2]
                raise UserError(f"--resume is {value!r:.80}; write --resume, --resume=auto or --from CHECKPOINT")
        return super().parse_args(ctx, ["--resume-auto" if arg == "--resume=auto" else arg for arg in args])
