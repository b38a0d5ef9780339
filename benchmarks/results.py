"""Where the benchmarks of this repository keep their rows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tightfit.report import results

RESULTS = Path(__file__).parent / "results"


def append_row(name: str, values: Mapping[str, Any], *, folder: Path = RESULTS, commit: str | None = None) -> None:
    """Add one row to `folder/name.csv`, with the conditions it was measured under."""
    results.append_row(name, values, folder=folder, commit=commit)
