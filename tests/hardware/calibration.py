"""The stored measurements of benchmarks/calibrate.py, read for the tests that tie constants to them."""

import csv
from dataclasses import dataclass

from benchmarks.reports.documentation import RESULTS


@dataclass(frozen=True)
class Row:
    """One measurement on the H200."""

    kind: str
    case: str
    dtype: str
    ms: float
    tflop: float
    gb: float


COMMITS = {"host": ("db97e30", "ed2cee4526")}
"""That constants of a kind were set from, where not all are of the first; the later row of a case counts."""


def rows(kind: str, dtype: str | None = None) -> list[Row]:
    """Of the commits the constants were set from, in their order."""
    commits = COMMITS.get(kind, ("db97e30",))
    with (RESULTS / "calibration.csv").open(encoding="utf-8", newline="") as file:
        found = [row for row in csv.DictReader(file) if row["commit"] in commits and "H200" in row["device"]]
    made = [Row(r["kind"], r["case"], r["dtype"], *(float(r[name]) for name in ("ms", "tflop", "gb"))) for r in found]
    return [row for row in made if row.kind == kind and dtype in (None, row.dtype)]


def fitted(points: list[tuple[float, float, float]]) -> tuple[float, float]:
    """a and b of t ≈ a x + b y, by least squares of relative errors, for points (x, y, t)."""
    xx, xy, yy, x1, y1 = (
        sum(p * q for p, q in pairs)
        for pairs in (
            [(x / t, x / t) for x, _, t in points],
            [(x / t, y / t) for x, y, t in points],
            [(y / t, y / t) for _, y, t in points],
            [(x / t, 1.0) for x, _, t in points],
            [(y / t, 1.0) for _, y, t in points],
        )
    )
    scale = xx * yy - xy * xy
    return (x1 * yy - xy * y1) / scale, (xx * y1 - xy * x1) / scale
