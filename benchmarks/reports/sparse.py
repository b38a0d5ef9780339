"""2:4 weights beside dense ones as a table: the newest row of every form, number of rows and shape."""

import csv
from pathlib import Path

COLUMNS = ("rows", "inputs", "outputs", "form", "ms in a graph", "ms as called", "TFLOP/s", "gain", "commit")


def sparse_rows(path: Path) -> tuple[tuple[str, ...], list[list[str]]]:
    """Header and lines of the table of `sparse_graphs.csv`."""
    with path.open(encoding="utf-8", newline="") as file:
        newest = {(row["inputs"], row["outputs"], int(row["rows"]), row["form"]): row for row in csv.DictReader(file)}
    return COLUMNS, [_line(row) for row in newest.values()]


def _line(row: dict[str, str]) -> list[str]:
    return [
        f"{int(row['rows']):,}",
        row["inputs"],
        row["outputs"],
        row["form"],
        f"{float(row['graph_ms']):.3f}",
        f"{float(row['called_ms']):.3f}",
        f"{float(row['tflop_s']):,.0f}",
        f"{float(row['gain']):.2f}",
        f"`{row['commit']}`",
    ]
