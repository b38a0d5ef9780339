"""How far predictions were from measurements: tables from the rows of benchmarks/memory_truth.py.

Results are only ever appended, so a case may have been measured several times: its newest row counts.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.reports.scatter import Errors, errors, newest, points

Rows = tuple[Sequence[str], Sequence[Sequence[str]]]


class Predicted(NamedTuple):
    """One kind of prediction: what of, by which source, and the two columns to compare."""

    what: str
    source: str
    predicted: str
    measured: str


PREDICTED = (
    Predicted("peak allocated", "formulas", "formula_gib", "measured_gib"),
    Predicted("peak allocated", "simulation", "simulated_gib", "measured_gib"),
    Predicted("peak reserved", "simulation", "simulated_reserved_gib", "measured_reserved_gib"),
    Predicted("time of a step", "the planner's costs", "predicted_step_ms", "measured_step_ms"),
)


def summary(rows: Sequence[dict[str, str]]) -> list[tuple[Predicted, Errors]]:
    """Mean and worst error of each kind of prediction."""
    return [(kind, errors(points(rows, kind.predicted, kind.measured))) for kind in PREDICTED]


def summary_rows(path: Path) -> Rows:
    """The short table: how far to trust what, where it was measured at all."""
    shown = [
        (kind.what, kind.source, str(found.rows), f"{found.mean:.1%}", f"{found.worst:.1%}")
        for kind, found in summary(newest(path))
        if found.rows
    ]
    return ("predicted", "by", "rows", "mean error", "worst"), shown


def step_error_rows(paths: Sequence[Path]) -> Rows:
    """Mean and worst error of step times, of each table."""
    rows = []
    for path in paths:
        found = errors(points(newest(path), "predicted_step_ms", "measured_step_ms"))
        rows.append((f"`{path.name}`", str(found.rows), f"{found.mean:.1%}", f"{found.worst:.1%}"))
    return ("table", "steps", "mean error", "worst"), rows


def measured_on(path: Path) -> str:
    """Which device, versions and commits the rows are from."""
    rows = newest(path)
    devices, versions, commits = (sorted({row[name] for row in rows}) for name in ("device", "torch", "commit"))
    named = ", ".join(f"`{commit}`" for commit in commits)
    return f"{len(rows)} steps on one {' and one '.join(devices)} (torch {', '.join(versions)}; commit {named})."


def truth_rows(path: Path) -> Rows:
    """Every case with what was measured and how far each prediction was off."""
    header = (
        "model",
        "rows × tokens",
        "settings",
        "allocated",
        "by formulas",
        "by simulation",
        "reserved",
        "by simulation",
        "step",
        "by costs",
    )
    return header, [_shown(row) for row in newest(path)]


def _shown(row: dict[str, str]) -> tuple[str, ...]:
    batch = f"{row['micro_batch']} × {int(row['sequence_length']):,}"
    found = [_off(row, kind) for kind in PREDICTED]
    allocated, reserved = (_gib(row[column]) for column in ("measured_gib", "measured_reserved_gib"))
    step = f"{float(row['measured_step_ms']):,.0f} ms" if row["measured_step_ms"] else "–"
    return (row["model"], batch, settings(row), allocated, found[0], found[1], reserved, found[2], step, found[3])


def _gib(text: str) -> str:
    return f"{float(text):.2f} GiB" if text else "out of memory"


def _off(row: dict[str, str], kind: Predicted) -> str:
    """How far one prediction was off, signed; a dash where there was none or nothing was measured."""
    if not (row[kind.predicted] and row[kind.measured]):
        return "–"
    return signed(float(row[kind.predicted]) / float(row[kind.measured]) - 1)


def signed(off: float) -> str:
    """Per cent with a sign, but of nothing."""
    return f"{off:+.1%}" if abs(off) >= 0.0005 else "0.0%"


def settings(row: dict[str, str]) -> str:
    """A case's precision, layout and levers in words; what is as usual is left out."""
    every = int(row["checkpoint_every"])
    recomputed = "every layer" if every == 1 else f"one layer in {every}"
    words = [
        row["precision"],
        f"{row['layers']} layers" if row.get("layers", "0") != "0" else "",
        "Hugging Face's model" if row["implementation"] == "huggingface" else "",
        _ranks(row),
        f"{recomputed} recomputed" if every else "",
        "plain loss" if row["loss"] == "plain" and row["implementation"] == "tightfit" else "",
        f"{row['accumulation']} micro-batches" if row["accumulation"] != "1" else "",
        *(f"`{lever}`" for lever in row.get("more", "").split()),
    ]
    return ", ".join(word for word in words if word)


def _ranks(row: dict[str, str]) -> str:
    """How many, what data ranks share, how else they split the work, and which stage of a pipeline it is."""
    if row["ranks"] == "1":
        return ""
    split = row.get("split", "")
    shared = f"ZeRO-{row['zero']}" if row["zero"] != "0" else "" if split else "DDP"
    stage = f"stage {row['stage']}" if "pipeline" in split else ""
    words = [f"{row['ranks']} ranks", shared, *(f"`{field}`" for field in split.split()), stage]
    return ", ".join(word for word in words if word)
