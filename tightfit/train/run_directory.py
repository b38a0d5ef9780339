"""The directory of a run: its files, what a new start may do with them, and the first write.

    job.yaml  metrics.jsonl  loss.png  pipeline.json  tensorboard/  wandb/  checkpoints/step-…      a run's own files
    .lock        while a process writes (writer_lock.py)
    .replaced/   under --overwrite: the old run, until the new one has a checkpoint
    .moving/     the old run while its files are moved to .replaced or back
    aside-…/     under --from: checkpoints later than the one that was resumed

`decide` only reads. `opened` is the first write of a run; it comes after all checks. A run that fails before its first
checkpoint restores what was there before it: the old run is moved back; a directory that was made for nothing is
removed. `recover` completes, at the next start, moves that a kill interrupted.
"""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from tightfit.durable import discard_directory, durable_file, flush, refuse_unwritable, sweep
from tightfit.errors import UserError
from tightfit.jobs.job import Job
from tightfit.jobs.paths import JOB_FILE, MARK, is_run_file
from tightfit.models.resolve import checkpoints_of
from tightfit.train.metrics import METRICS_FILE
from tightfit.writer_lock import locked, refuse_if_locked

REPLACED, MOVING = ".replaced", ".moving"
CHECKPOINTS = "checkpoints"
OWN_FILES = (JOB_FILE, METRICS_FILE, "loss.png", "pipeline.json", "tensorboard", "wandb", "mlflow.db")


@dataclass(frozen=True)
class Start:
    """How a run is to begin: anew, where another one ended, or in another one's place."""

    resume: bool | Literal["auto"] = False
    """`auto` begins anew where there is no checkpoint."""
    overwrite: bool = False
    checkpoint: str | None = None
    """The name of the checkpoint to resume from, where it is not the newest."""

    def __post_init__(self) -> None:
        if self.overwrite and (self.resume or self.checkpoint):
            raise UserError("--resume goes on with a run and --overwrite replaces it; give one of the two")


@dataclass(frozen=True)
class Decision:
    """What a start will do in a directory."""

    checkpoint: Path | None = None
    later: tuple[Path, ...] = ()
    """Checkpoints after `checkpoint`, which are moved aside."""
    replaces: bool = False
    """Whether an old run, or files of one, are there and will be replaced."""


def decide(output: Path, start: Start) -> Decision:
    """What `start` will do in `output`; a UserError where it may not. Nothing is written."""
    refuse_unwritable(output, output)
    refuse_if_locked(output)
    try:
        return _decision(output, start)
    except UserError:
        refuse_if_locked(output)  # a run that began there just now is the better reason
        raise


def _refuse_inside_checkpoints(output: Path) -> None:
    for place in output.parents:
        if place.name == CHECKPOINTS and is_run_file(place.parent / JOB_FILE):
            raise UserError(
                f"output {output} is among the checkpoints of the run {place.parent}, which go as newer ones come; "
                "choose another output"
            )


def _decision(output: Path, start: Start) -> Decision:
    _refuse_inside_checkpoints(output)
    found = checkpoints_of(output)
    if start.resume or start.checkpoint:
        if found:
            return _resumed(output, found, start)
        if start.resume != "auto":
            raise UserError(
                f"{output} has no checkpoint to resume from; --resume=auto begins anew there, or name the run's place"
            )
    there = [name for name in OWN_FILES if os.path.lexists(output / name)]
    if there and not found and not is_run_file(output / JOB_FILE):
        raise UserError(f"{output / there[0]} was not written by a run, which would replace it; choose another output")
    if found and not start.overwrite:
        raise UserError(f"{output} already holds a run; add --resume, --overwrite or -o output=ELSEWHERE")
    if there and not (start.overwrite or start.resume == "auto"):
        raise UserError(
            f"{output} already holds {', '.join(there)} of a run without a checkpoint; add --overwrite or "
            "-o output=ELSEWHERE"
        )
    return Decision(replaces=bool(found or there))


def _resumed(output: Path, found: list[Path], start: Start) -> Decision:
    if start.checkpoint is None:
        return Decision(found[-1])
    name = Path(start.checkpoint).name
    chosen = next((path for path in found if path.name == name), None)
    if chosen is None:
        raise UserError(f"{output} has no checkpoint {name}; there are {', '.join(path.name for path in found)}")
    return Decision(chosen, tuple(found[found.index(chosen) + 1 :]))


def recover(output: Path) -> None:
    """Finish moves that a kill interrupted: the old run comes back unless the one replacing it has a checkpoint."""
    if not any((output / name).is_dir() for name in (REPLACED, MOVING)):
        return
    with locked(output), _told(output):
        if (output / MOVING).is_dir():
            _move_back(output)
        elif checkpoints_of(output):
            discard_directory(output / REPLACED)
        else:
            _give_back(output)


@contextmanager
def opened(job: Job, decision: Decision, start: Start) -> Iterator["OpenedRun"]:
    """The run's directory with its lock held and job.yaml in it, ready for a run to write to."""
    directories = _missing_directories(job.output)
    run = OpenedRun(job.output, decision, directories)
    try:
        with _told(job.output):
            job.output.mkdir(parents=True, exist_ok=True)
        with locked(job.output):
            try:
                run.begin(job, start)
                yield run
            except BaseException:
                run.undo()
                raise
    except BaseException:
        run.remove_empty()
        raise


class OpenedRun:
    """A run that is being written."""

    def __init__(self, output: Path, decision: Decision, directories: list[Path]) -> None:
        self.output, self.decision, self.made_directories = output, decision, directories
        self.had_checkpoint = decision.checkpoint is not None
        self.replacing = False
        self.has_written = False
        self.is_worth_keeping = False
        """Set after the first step: its metrics are kept even if the run fails."""

    def begin(self, job: Job, start: Start) -> None:
        """The first write: refuse a directory that changed since `decide`, set the old run aside, write the job."""
        if _decision(self.output, start) != self.decision:
            raise UserError(f"{self.output} has changed while this run was being prepared; start it again")
        with _told(self.output):
            sweep(self.output)
            sweep(self.output / CHECKPOINTS)
            if self.decision.replaces:
                _move_aside(self.output)
                self.replacing = True
            if self.decision.later:
                _set_later_aside(self.output, self.decision.later)
            self.has_written = True
            with durable_file(self.output / JOB_FILE) as file:
                text = yaml.safe_dump(job.model_dump(mode="json"), sort_keys=False)
                file.write_text(MARK + text, encoding="utf-8")

    def settle(self) -> None:
        """Delete the old run, once this one has a checkpoint; call this after every save."""
        if self.replacing and checkpoints_of(self.output):
            self.replacing = False
            with suppress(OSError):
                discard_directory(self.output / REPLACED)

    def undo(self) -> None:
        """Restore what was there before, unless this run has a checkpoint or, in a new directory, metrics of a step."""
        if (self.output / MOVING).is_dir():
            _move_back(self.output)
        if not self.has_written or self.had_checkpoint or checkpoints_of(self.output):
            return
        if self.replacing:
            _give_back(self.output)
        elif not self.is_worth_keeping:
            _remove_own(self.output)

    def remove_empty(self) -> None:
        """Remove the directories that were made for this run and are empty, innermost first."""
        for directory in self.made_directories:
            with suppress(OSError):
                directory.rmdir()


def _missing_directories(path: Path) -> list[Path]:
    """Those of `path` and its parents that do not exist, innermost first."""
    return [place for place in (path, *path.parents) if not place.exists()]


def _own_entries(output: Path) -> Iterator[Path]:
    """The run's own files and checkpoints, relative to its directory; other files are left alone."""
    yield from (Path(name) for name in OWN_FILES if (output / name).exists())
    yield from (path.relative_to(output) for path in checkpoints_of(output))


def _move_aside(output: Path) -> None:
    moving = output / MOVING
    (moving / CHECKPOINTS).mkdir(parents=True)
    for entry in list(_own_entries(output)):
        os.rename(output / entry, moving / entry)
    os.rename(moving, output / REPLACED)
    flush(output)


def _give_back(output: Path) -> None:
    """Put the old run back in place of one that failed before its first checkpoint."""
    _remove_own(output)
    os.rename(output / REPLACED, output / MOVING)
    _move_back(output)


def _move_back(output: Path) -> None:
    moving = output / MOVING
    for entry in list(_own_entries(moving)):
        (output / entry).parent.mkdir(exist_ok=True)
        os.rename(moving / entry, output / entry)
    flush(output)
    shutil.rmtree(moving, ignore_errors=True)


def _remove_own(output: Path) -> None:
    sweep(output / CHECKPOINTS)
    for entry in [output / name for name in OWN_FILES]:
        if entry.is_dir():
            discard_directory(entry)
        else:
            entry.unlink(missing_ok=True)
    with suppress(OSError):
        (output / CHECKPOINTS).rmdir()


def _set_later_aside(output: Path, later: tuple[Path, ...]) -> None:
    aside = output / f"aside-{time.strftime('%Y%m%d-%H%M%S')}"
    aside.mkdir(exist_ok=True)
    for path in later:
        os.rename(path, aside / path.name)
    flush(output)


@contextmanager
def _told(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write output {output}: {error.strerror}; choose a writable directory") from error
