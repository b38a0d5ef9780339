"""Append-only results: every row names the commit, the device and the versions it was measured with."""

import csv
import fcntl
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import tightfit
from tightfit.errors import UserError

RESULTS = Path(__file__).parent / "results"
PICTURES = Path(__file__).parents[1] / "docs" / "pictures"


def picture_folder(results: Path) -> Path:
    """Where the pictures of rows in `results` go: those of our own into docs, others beside their rows."""
    return PICTURES if results.resolve() == RESULTS.resolve() else results


def append_row(name: str, values: Mapping[str, Any], *, folder: Path = RESULTS, commit: str | None = None) -> None:
    """Add one row to `folder/name.csv`; the columns of an existing file are kept."""
    row = {**_conditions(commit), **values}
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):  # processes that share a table append to it
        _append(folder / f"{name}.csv", row)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Nobody else appends to tables of `folder` meanwhile."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _append(path: Path, row: Mapping[str, Any]) -> None:
    fresh = not path.exists()
    columns = list(row)
    if not fresh:
        try:
            with path.open(encoding="utf-8", newline="") as file:
                columns = next(csv.reader(file), [])
        except (UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"{path} is not a table of results ({error}); move it away") from None
        if set(columns) != set(row):
            raise UserError(f"{path} has columns {columns}, the new row has {list(row)}; move the old file away")
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=columns)
        if fresh:
            writer.writeheader()
        writer.writerow(row)


def version_of(package: str) -> str:
    """The installed version, or nothing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _conditions(commit: str | None) -> dict[str, str]:
    import torch

    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit or current_commit(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version_of("transformers"),
    }


@cache  # before the first row changes the checkout
def current_commit() -> str:
    """The short commit of the checkout this package runs from, marked when it has changes; else the version."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], capture_output=True, check=True)
        describe = [*git, "describe", "--always", "--dirty", "--abbrev=10"]
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return tightfit.__version__
