"""docs/scale.md: its tables are the newest rows, and those rows are still what formulas and planner say."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reports.documentation import RESULTS
from benchmarks.reports.scale import _newest, plan_rows, published_rows, stage_rows, time_rows
from benchmarks.scale import CASES, chosen
from tests.covering import sampled
from tightfit.errors import UserError
from tightfit.hardware.machine import parse_machine
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.memory.formulas.training import training_ledger
from tightfit.models.presets import preset
from tightfit.plan.answer import make_workload
from tightfit.plan.cost import Costs

ADVICE = "run `python -m benchmarks.scale --simulate 600`, then `make docs`"
NEWEST = _newest(RESULTS / "scale.csv", ("case", "how"))
H100_TFLOP_S = 989.4
STAGE = {"case": "a", "how": "planned", "layers": "2", "formula_gib": "10.0", "simulated_gib": ""}


@pytest.mark.parametrize("row", NEWEST, ids=lambda row: f"{row['case']}, {row['how']}")
def test_rows_are_what_the_planner_says(row: Mapping[str, str]) -> None:
    spec, machine = preset(row["model"]), parse_machine(row["machine"])
    length, batch = int(row["sequence_length"]), int(row["global_batch"])
    workload = make_workload(spec, machine, sequence_length=length, rows=batch, precision="bf16")
    layout, levers = Layout.model_validate_json(row["layout_json"]), Levers.model_validate_json(row["levers_json"])
    assert layout.ranks == machine.ranks == int(row["gpus"])
    seconds = Costs(workload, machine).layout_cost(layout).step(levers).step_s
    assert float(row["step_s"]) == pytest.approx(seconds, rel=0.05), ADVICE
    gib = training_ledger(workload, layout, levers).peak_bytes() / 2**30
    assert float(row["peak_gib"]) == pytest.approx(gib, rel=0.05), ADVICE
    speed = batch * length / seconds / machine.ranks
    assert float(row["tokens_per_second_per_gpu"]) == pytest.approx(speed, rel=0.05), ADVICE


@sampled(3)
@pytest.mark.parametrize("row", NEWEST, ids=lambda row: row["case"])
def test_the_planner_still_picks_it(row: Mapping[str, str]) -> None:
    one = chosen(row["case"], CASES[row["case"]])
    assert one.how == row["how"]
    assert one.layout == Layout.model_validate_json(row["layout_json"]), ADVICE
    assert one.levers == Levers.model_validate_json(row["levers_json"]), ADVICE


def test_mfu_counts_the_model_s_own_work() -> None:
    """Llama 3 says 430 TFLOP/s a GPU where it says 43 %: the same peak, to its rounding."""
    assert pytest.approx(0.43, abs=0.005) == 430 / H100_TFLOP_S
    row = next(row for row in NEWEST if row["case"] == "405B on 8192")
    layers, width, mlp, keys, vocabulary, length = 126, 16384, 53248, 1024, 128256, 8192
    weights = layers * (2 * width * width + 2 * width * keys + 3 * width * mlp) + width * vocabulary
    attention = layers * 4 * width * (length / 2) * 3  # scores and values, seen by half, forward and twice backward
    flops = 6 * weights + attention
    mfu = float(row["tokens_per_second_per_gpu"]) * flops / (H100_TFLOP_S * 1e12)
    assert float(row["mfu"]) == pytest.approx(mfu, rel=0.01)


def test_questions_and_published_runs_are_all_there() -> None:
    assert {row["case"] for row in NEWEST} == set(CASES)
    said = [row[3] for row in published_rows(RESULTS)[1]]
    figures = ["5762–6667 tokens/s/GPU", "100 tokens/s/GPU", "128 tokens/s/GPU", "43% MFU", "41% MFU", "38% MFU"]
    assert said == figures
    assert len(plan_rows(RESULTS)[1]) == 5
    assert len(time_rows(RESULTS)[1]) == 5 + len(figures)


def test_shares_of_time_add_up() -> None:
    for row in time_rows(RESULTS)[1]:
        assert sum(int(cell.removesuffix("%")) for cell in row[1:] if cell != "–") == pytest.approx(100, abs=3), row


def test_stages_of_an_older_plan_are_left_out_and_equal_neighbours_are_one_line(tmp_path: Path) -> None:
    def stages(count: int, **changes: Any) -> list[dict[str, str]]:
        return [STAGE | {"stage": str(each), "stages": str(count)} | changes for each in range(count)]

    newest = stages(3, formula_gib="9.0")
    newest[2] |= {"layers": "1", "simulated_gib": "8.5"}
    with (tmp_path / "scale_stages.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(newest[0]))
        writer.writeheader()
        writer.writerows([*stages(4), *newest])
    lines = stage_rows(tmp_path)[1]
    assert lines == [("a, planned", "0 to 1", "2", "9.0", "–"), ("a, planned", "2", "1", "9.0", "8.5")]


def test_missing_results_get_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"scale\.csv; run benchmarks/scale\.py first"):
        plan_rows(tmp_path)
