"""The distillation loss beside Liger's and beside all logits at once, as a table: the newest row of every case."""

import csv
from pathlib import Path

COLUMNS = ("rows", "student, teacher wide", "loss", "ms", "GiB beside its inputs")


def distillation_rows(path: Path) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and lines of the table of `distill_loss.csv`; `ideal` are the products alone."""
    newest = _newest(path)
    lines: list[tuple[str, ...]] = []
    for (rows, width, taught, _), row in newest.items():
        shape = (f"{int(rows):,}", f"{width}, {taught}")
        if not any(line[:2] == shape for line in lines):
            lines.append((*shape, "the four products alone", f"{float(row['ideal_ms']):.0f}", ""))
        lines.append((*shape, row["loss"], f"{float(row['ms']):.0f}", f"{float(row['peak_gib']):.2f}"))
    return COLUMNS, lines


def distillation_measured(path: Path) -> str:
    """Where and with what those rows were measured."""
    rows = list(_newest(path).values())
    last, commits = rows[-1], dict.fromkeys(f"`{row['commit']}`" for row in rows)
    vocabulary = f"{int(last['vocabulary']):,}"
    return f"A vocabulary of {vocabulary}, bf16, on {last['device']}, torch {last['torch']}, at {', '.join(commits)}."


def _newest(path: Path) -> dict[tuple[str, ...], dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return {
            tuple(row[name] for name in ("rows", "width", "teacher_width", "loss")): row for row in csv.DictReader(file)
        }
