"""Predicted against measured memory, as a picture, from the rows of benchmarks/memory_truth.py."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tightfit.errors import UserError
from tightfit.report.figure import panels, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SERIES = {
    "allocated": (("formula_gib", "measured_gib"), ("simulated_gib", "measured_gib")),
    "reserved": (("simulated_reserved_gib", "measured_reserved_gib"),),
}
STYLES = {
    "formula_gib": ("formulas", "#e0a458", "s"),
    "simulated_gib": ("simulation", "#1f5fa8", "o"),
    "simulated_reserved_gib": ("simulation", "#1f5fa8", "o"),
}

CONDITIONS = ("date", "commit", "predicted_commit", "python", "torch", "transformers")
"""Columns that say when and with what a case was measured, not which case it is."""


class Errors(NamedTuple):
    """How far predictions are from measurements, as shares of the latter."""

    rows: int
    mean: float
    worst: float


Points = list[tuple[float, float]]


def read_truth(path: Path) -> list[dict[str, str]]:
    """The rows of a results file, or a sentence."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {path} ({reason}); measure with benchmarks/memory_truth.py first") from None
    wanted = {column for pairs in SERIES.values() for pair in pairs for column in pair}
    missing = sorted(wanted - set(rows[0])) if rows else sorted(wanted)
    if missing:
        raise UserError(f"{path} has no rows with column {missing[0]}; measure with benchmarks/memory_truth.py first")
    return rows


def newest(path: Path) -> list[dict[str, str]]:
    """The newest row of each case, in the order the cases first came: results are only ever appended."""
    latest: dict[tuple[str, ...], dict[str, str]] = {}
    for row in read_truth(path):
        columns = list(row)[: list(row).index("formula_gib")]
        latest[tuple(row[column] for column in columns if column not in CONDITIONS)] = row
    return list(latest.values())


def points(rows: Sequence[dict[str, str]], predicted: str, measured: str) -> Points:
    """(measured, predicted) of the rows that have both; a run that ran out of memory has no measurement."""
    found = []
    for row in rows:
        pair = _number(row[measured]), _number(row[predicted])
        if pair[0] and pair[1]:
            found.append((pair[0], pair[1]))
    return found


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None


def errors(found: Points) -> Errors:
    """Mean and largest |predicted / measured − 1|."""
    apart = [abs(predicted / measured - 1) for measured, predicted in found]
    return Errors(len(apart), sum(apart) / len(apart), max(apart)) if apart else Errors(0, 0.0, 0.0)


def draw_truth(source: Path, path: Path) -> dict[str, Errors]:
    """Allocated and reserved peaks, predicted against measured; returns the errors that the legend shows."""
    rows = newest(source)
    shown: dict[str, Errors] = {}
    with panels(path, 2, len(SERIES), width=10, height=7) as (figure, axes):
        for column, (kind, pairs) in enumerate(SERIES.items()):
            above, below = axes[0][column], axes[1][column]
            everything: Points = []
            for predicted, measured in pairs:
                found = points(rows, predicted, measured)
                shown[predicted] = errors(found)
                _draw_points(above, below, predicted, found, shown[predicted])
                everything += found
            _draw_lines(above, below, everything)
            above.set(title=f"peak {kind}", ylabel="predicted, GiB")
            below.set(xlabel="measured, GiB", ylabel="predicted beyond measured, %")
        figure.suptitle("Memory of a training step: predicted against measured")
    return shown


def _draw_points(above: "Axes", below: "Axes", predicted: str, found: Points, apart: Errors) -> None:
    name, color, marker = STYLES[predicted]
    label = f"{name}: {apart.rows} rows, mean error {apart.mean:.1%}, worst {apart.worst:.1%}"
    x, y = [measured for measured, _ in found], [value for _, value in found]
    beyond = [100 * (value / measured - 1) for measured, value in found]
    above.scatter(x, y, s=22, color=color, marker=marker, alpha=0.8, linewidths=0, label=label)
    below.scatter(x, beyond, s=22, color=color, marker=marker, alpha=0.8, linewidths=0)


def _draw_lines(above: "Axes", below: "Axes", found: Points) -> None:
    """Where predictions would be right."""
    values = [value for pair in found for value in pair] or [1.0, 10.0]
    ends = 0.8 * min(values), 1.25 * max(values)
    above.plot(ends, ends, color="#555555", linewidth=0.8)
    above.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    above.legend(frameon=False, fontsize=8, loc="upper left")
    below.axhline(0, color="#555555", linewidth=0.8)
    below.set(xscale="log", xlim=ends)
    for axes in (above, below):
        plain(axes)
