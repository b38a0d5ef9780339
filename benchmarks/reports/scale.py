"""Tables of docs/scale.md, from what benchmarks/scale.py wrote: plans, their stages, and published runs beside them."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from tightfit.errors import UserError

Rows = tuple[Sequence[str], Sequence[Sequence[str]]]
Row = dict[str, str]
HOW = {"planned": "the planner", "pinned": "by hand"}
PARTS = ("compute", "straggler", "recompute", "tensor", "context", "data", "pipeline", "bubble", "optimizer")


def plan_rows(folder: Path) -> Rows:
    """What the planner picks for each question."""
    rows = []
    for row in _newest(folder / "scale.csv", ("case", "how")):
        if row["how"] in HOW:
            question = f"{row['model']} on {row['machine']}, {row['global_batch']} × {row['sequence_length']} tokens"
            rows.append(
                (
                    question,
                    HOW[row["how"]],
                    row["layout"],
                    row["levers"],
                    f"{row['peak_gib']} of {row['card_gib']} GiB",
                    _seconds(row["step_s"]),
                    _speed(row["tokens_per_second_per_gpu"]),
                    _percent(row["mfu"]),
                )
            )
    header = ("question", "split by", "layout", "levers", "fullest GPU", "step", "tokens/s/GPU", "MFU")
    return header, rows


def time_rows(folder: Path) -> Rows:
    """Where the seconds of those steps go, in percent."""
    rows = []
    for row in _newest(folder / "scale.csv", ("case", "how")):
        shares = [float(row[f"{part}_s"]) / float(row["step_s"]) for part in PARTS]
        rows.append((_name(row), *(f"{share:.0%}" if share >= 0.005 else "–" for share in shares)))
    return ("plan", *PARTS), rows


def published_rows(folder: Path) -> Rows:
    """Published layouts, costed by the planner, beside what was measured."""
    rows = []
    for row in _newest(folder / "scale.csv", ("case", "how")):
        if row["how"] == "published":
            said = row["published_tokens"] or _percent(row["published_mfu"])
            ours = _speed(row["tokens_per_second_per_gpu"]) if row["published_tokens"] else _percent(row["mfu"])
            unit = "tokens/s/GPU" if row["published_tokens"] else "MFU"
            memory = f"{row['peak_gib']} of {row['card_gib']} GiB"
            rows.append((f"{row['gpus']} × H100", row["layout"], row["published"], f"{said} {unit}", ours, memory))
    return ("GPUs", "layout", "who", "published", "our prediction", "fullest GPU by formula"), rows


def stage_rows(folder: Path) -> Rows:
    """Memory of the pipeline stages: all by formula (neighbours that are alike together), some rehearsed."""
    by_plan: dict[tuple[str, str], list[Row]] = {}
    for row in _newest(folder / "scale_stages.csv", ("case", "how", "stage")):
        stages = by_plan.setdefault((row["case"], row["how"]), [])
        if not stages or row["stages"] == stages[0]["stages"]:  # else of an older plan, with more of them
            stages.append(row)
    rows = [line for stages in by_plan.values() for line in _stages(stages)]
    return ("plan", "stage", "layers", "formula, GiB", "rehearsed, GiB"), rows


def _stages(stages: list[Row]) -> Iterator[Sequence[str]]:
    """One line for each run of stages with the same layers, where none of them was rehearsed."""
    run: list[Row] = []
    for row in stages:
        alike = run and row["layers"] == run[0]["layers"] and not row["simulated_gib"] and not run[0]["simulated_gib"]
        if run and not alike:
            yield _line(run)
            run = []
        run.append(row)
    yield _line(run)


def _line(run: list[Row]) -> Sequence[str]:
    first, last = run[0], run[-1]
    stage = first["stage"] if first is last else f"{first['stage']} to {last['stage']}"
    sizes = [float(row["formula_gib"]) for row in run]
    formula = f"{sizes[0]:.1f}" if sizes[0] == sizes[-1] else f"{sizes[0]:.1f} to {sizes[-1]:.1f}"
    return (_name(first), stage, first["layers"], formula, first["simulated_gib"] or "–")


def _name(row: Row) -> str:
    return f"{row['case']}, {row['how']}"


def _seconds(text: str) -> str:
    return f"{float(text):.3g} s"


def _speed(text: str) -> str:
    return f"{float(text):,.0f}"


def _percent(text: str) -> str:
    return f"{float(text):.0%}"


def _newest(path: Path, keys: Sequence[str]) -> list[Row]:
    """The last row of each kind, in the order of their first."""
    if not path.is_file():
        raise UserError(f"there is no {path}; run benchmarks/scale.py first")
    with path.open(encoding="utf-8", newline="") as file:
        found = {tuple(row[key] for key in keys): row for row in csv.DictReader(file)}
    return [row for row in found.values() if row["how"] in (*HOW, "published")]  # else a question no longer asked
