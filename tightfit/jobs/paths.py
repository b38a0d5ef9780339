"""The files a job names, as absolute paths, so that the job works from every directory and after its run was moved.

A relative name is looked up from the working directory, as a shell would, and then beside the job file. Names that are
not files (presets, `stdlib`, `train`) and missing files stay as written, for the error message about them. A job that
is read from a run's directory has that directory as its output, wherever it was moved to: `run_output`.
"""

import os
from glob import has_magic, iglob
from pathlib import Path
from typing import Any

from tightfit.errors import UserError
from tightfit.jobs.job import Job
from tightfit.models.presets import PRESETS

JOB_FILE = "job.yaml"
MARK = "# Written by tightfit: the job as it ran.\n"
"""The first line of a run's job.yaml, which tells it apart from a job file of the user's."""
NOT_FILES = frozenset({"stdlib", "smollm2-135m-instruct", "model", "train", *PRESETS})


def is_run_file(path: Path) -> bool:
    """Whether `path` is a job.yaml written by a run; a pipe is not opened, as it may never answer."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(MARK)) == MARK.encode()
    except OSError:
        return False


def run_output(path: Path) -> Path | None:
    """The directory of the run that `path`, a directory or a job file, belongs to; None for a job of the user's."""
    if path.is_dir():
        return absolute(path)
    return absolute(path.parent) if is_run_file(path) else None


def with_absolute_paths(job: Job, beside: Path | None = None) -> Job:
    """`job` with every file it names as an absolute path, looked up also in `beside`, the directory of its job file."""

    def found(name: str) -> str:
        return _found(name, beside)

    data: dict[str, Any] = {"train": [found(name) for name in job.data.train]}
    if isinstance(job.data.held_out, list):
        data["held_out"] = [found(name) for name in job.data.held_out]
    if not job.data.cache.is_absolute() and not str(job.data.cache).startswith("~"):
        data["cache"] = absolute(job.data.cache)
    changes: dict[str, Any] = {
        "data": job.data.model_copy(update=data),
        "model": job.model.model_copy(update={"source": found(job.model.source)}),
        "output": absolute(job.output.expanduser()),
    }
    if job.distill.teacher is not None:
        changes["distill"] = job.distill.model_copy(update={"teacher": found(job.distill.teacher)})
    if "tokenizer" in job.model_fields_set:
        changes["tokenizer"] = job.tokenizer.model_copy(update={"source": found(job.tokenizer.source)})
    return job.model_copy(update=changes)


def absolute(path: Path) -> Path:
    """The absolute path, without `..` unless a symbolic link makes it lead elsewhere."""
    plain = Path(os.path.normpath(path.absolute()))
    return path.absolute() if path.exists() and not (plain.exists() and plain.samefile(path)) else plain


def _found(name: str, beside: Path | None) -> str:
    if name in NOT_FILES or not name:  # an empty name is refused where it is opened
        return name
    try:
        path = Path(name).expanduser()
    except RuntimeError:
        raise UserError(f"{name!r} begins with a home directory that does not exist; write the path out") from None
    for place in (path, *([] if beside is None else [beside / path])):
        try:
            if place.exists():
                return str(absolute(place))
            if has_magic(name) and next(iglob(str(place), recursive=True), None) is not None:
                return str(place.absolute())
        except (OSError, ValueError):  # a name too long for the file system, or with a null byte in it
            return name
    return name
