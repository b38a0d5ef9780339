"""The ladder of levers: rows of the benchmark as a table and a picture, newest first choice, mistakes in a sentence."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.reports.levers import NONE, draw_levers, lever_rows, named, rungs
from tightfit.errors import UserError

ROOT = Path(__file__).parents[2]
COLUMNS = ("case", "levers", "step_s", "peak_allocated_gib", "host_gib", "predicted_gib", "predicted_s")
ROWS = [
    ("1b-ladder", "", "0.20", "30.0", "0.0", "29.0", "0.21"),
    ("1b-ladder", "checkpoint_every=1", "0.30", "20.0", "0.0", "20.0", "0.31"),
    ("other", "tiles=8", "9.0", "1.0", "0.0", "1.0", "9.0"),
    ("1b-ladder", "offload=optimizer update_in_backward=True", "0.40", "9.0", "13.8", "9.1", "0.38"),
    ("1b-ladder", "tiles=8", "", "0.0", "0.0", "", ""),
    ("1b-ladder", "checkpoint_every=1", "0.25", "21.0", "0.0", "20.5", "0.26"),
]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "levers.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *ROWS])
    return path


def test_newest_rows_of_the_ladder_that_ran(table: Path) -> None:
    found = rungs(table)
    assert [(rung.name, rung.gpu_gib, rung.step_s) for rung in found] == [
        (NONE, 30.0, 0.2),
        ("checkpoint every layer", 21.0, 0.25),
        ("optimizer on the host, update in backward", 9.0, 0.4),
    ]
    header, rows = lever_rows(table)
    assert len(header) == 6
    assert rows[1] == ("checkpoint every layer", "21.0 GiB", "–", "0.250 s", "1.25 ×", "20.5 GiB, 0.260 s")
    assert named("tiles=8") == "tiles 8"


def test_the_picture_is_drawn(table: Path, tmp_path: Path) -> None:
    draw_levers(table, tmp_path / "levers.svg")
    text = (tmp_path / "levers.svg").read_text(encoding="utf-8")
    for words in (
        "checkpoints",
        "optimizer on host, early update",
        "host: GiB, pinned",
        "1.25 ×",
        "seconds a step",
        "predicted",
    ):
        assert words in text


def test_mistakes_get_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run benchmarks/levers\.py --ladder first"):
        rungs(tmp_path / "nothing.csv")
    (tmp_path / "empty.csv").write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match="has no rows of 1b-ladder"):
        rungs(tmp_path / "empty.csv")


@pytest.mark.thorough
def test_the_benchmark_writes_rows_anywhere(tmp_path: Path) -> None:
    """The tiny case on the CPU: three ways, one of them fitted by the planner, the same loss within float32."""
    command = [sys.executable, "-m", "benchmarks.levers", "--case", "cpu-tiny", "--results", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=300, cwd=ROOT, env=_environment())
    with (tmp_path / "levers.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["levers"] for row in rows] == ["", "checkpoint_every=1 tiles=2", ""]
    assert [row["fitted"] for row in rows] == ["0", "0", "1"]
    assert all(row["result"] == "ok" and float(row["step_s"]) > 0 and row["commit"] for row in rows)
    assert all(float(row["tokens_per_second"]) == pytest.approx(128 / float(row["step_s"]), rel=0.02) for row in rows)


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "OMP_NUM_THREADS": "1"}
