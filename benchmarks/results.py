"""Append-only results: every row names the commit, the device and the versions it was measured with."""

import csv
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def append_row(name: str, values: Mapping[str, Any], *, folder: Path = RESULTS, commit: str | None = None) -> None:
    """Add one row to `folder/name.csv`; the columns of an existing file are kept."""
    row = {**_conditions(commit), **values}
    path = folder / f"{name}.csv"
    folder.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    if not fresh:
        with path.open(encoding="utf-8", newline="") as file:
            columns = next(csv.reader(file))
        if set(columns) != set(row):
            raise SystemExit(f"{path} has columns {columns}, the new row has {list(row)}; start a new file")
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(row) if fresh else columns)
        if fresh:
            writer.writeheader()
        writer.writerow(row)


def _conditions(commit: str | None) -> dict[str, str]:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit or current_commit(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
    }


def current_commit() -> str:
    """The short commit of this checkout, marked when it has changes."""
    here = Path(__file__).parent
    describe = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
