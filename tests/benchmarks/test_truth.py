"""Tables of the truth: the newest row of a case counts, errors are those of the numbers beside them."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import memory_truth
from benchmarks.memory_truth import for_host, is_host_bound
from benchmarks.reports.documentation import ROOT, TRUTH
from benchmarks.reports.scatter import draw_truth, newest
from benchmarks.reports.truth import measured_on, settings, summary, summary_rows, truth_rows
from benchmarks.truth.case import Case
from benchmarks.truth.prediction import Measurement, Prediction, step_seconds
from tests.report.test_memory_pictures import words_of
from tightfit.errors import UserError
from tightfit.hardware.launches import LAYER, UPDATE_MS

ROW = {
    "commit": "abc",
    "device": "NVIDIA H200",
    "torch": "2.11",
    "model": "llama-3.2-1b",
    "sequence_length": "8192",
    "micro_batch": "2",
    "precision": "bf16",
    "checkpoint_every": "0",
    "loss": "fused",
    "accumulation": "1",
    "zero": "0",
    "ranks": "1",
    "implementation": "tightfit",
    "formula_gib": "9",
    "simulated_gib": "10.2",
    "measured_gib": "10",
    "simulated_reserved_gib": "11",
    "measured_reserved_gib": "12.5",
    "predicted_step_ms": "90",
    "measured_step_ms": "100",
}


def table(tmp_path: Path, *changes: dict[str, Any]) -> Path:
    path = tmp_path / "memory_truth.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(ROW))
        writer.writeheader()
        writer.writerows({**ROW, **change} for change in changes)
    return path


def test_the_newest_row_of_each_case_counts(tmp_path: Path) -> None:
    path = table(tmp_path, {"formula_gib": "5"}, {"zero": "3", "ranks": "8"}, {"commit": "def", "torch": "2.12"})
    rows = newest(path)
    assert [(row["commit"], row["zero"], row["formula_gib"]) for row in rows] == [("def", "0", "9"), ("abc", "3", "9")]
    assert measured_on(path) == "2 steps on one NVIDIA H200 (torch 2.11, 2.12; commit `abc`, `def`)."


def test_a_step_is_predicted_for_the_host_that_runs_it() -> None:
    """Which changes what the host bounds, and nothing where costs are not those of the prediction."""
    bound = Case(model="smollm2-135m", sequence_length=512, micro_batch=8, more="cuda_graph=never")
    free = Case(model="llama-3.1-8b", sequence_length=8192, micro_batch=1, precision="pure-bf16")
    assert [is_host_bound(case) for case in (bound, free, replace(bound, ranks=8))] == [True, False, False]
    for case, longer in ((bound, 1.9), (free, 1.0)):
        said = Prediction(1, 1, 1, step_seconds(case))
        slow = for_host(case, said, host_layer_ms=2 * (sum(LAYER[""]) + UPDATE_MS[""]))
        assert slow.step_s == pytest.approx(longer * step_seconds(case), rel=0.06)
        assert replace(slow, step_s=said.step_s) == said
        assert for_host(case, said, None) == said
        with pytest.raises(UserError, match="predict again"):
            for_host(case, replace(said, step_s=2 * step_seconds(case)), 3.0)


def test_errors_by_hand(tmp_path: Path) -> None:
    other = {"zero": "1", "ranks": "8", "formula_gib": "10.3", "simulated_gib": "9.9", "measured_step_ms": ""}
    path = table(tmp_path, {}, other)
    found = [(errors.rows, round(errors.mean, 4), round(errors.worst, 4)) for _, errors in summary(newest(path))]
    assert found == [(2, 0.065, 0.1), (2, 0.015, 0.02), (2, 0.12, 0.12), (1, 0.1, 0.1)]
    _, shown = summary_rows(path)
    assert shown[0] == ("peak allocated", "formulas", "2", "6.5%", "10.0%")
    assert len(shown) == 4
    untimed = table(tmp_path, {"measured_step_ms": ""})
    assert len(summary_rows(untimed)[1]) == 3, "what was not measured is not in it"


def test_every_row_is_shown_also_those_that_ran_out_of_memory(tmp_path: Path) -> None:
    full = {"sequence_length": "65536", "measured_gib": "", "measured_reserved_gib": "", "measured_step_ms": ""}
    header, rows = truth_rows(table(tmp_path, {}, full))
    assert rows[0][3:] == ("10.00 GiB", "-10.0%", "+2.0%", "12.50 GiB", "-12.0%", "100 ms", "-10.0%")
    assert rows[1][1:] == ("2 × 65,536", "bf16", "out of memory", "–", "–", "out of memory", "–", "–", "–")
    assert {len(row) for row in rows} == {len(header)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "bf16"),
        ({"ranks": "8"}, "bf16, 8 ranks, DDP"),
        ({"ranks": "8", "zero": "3", "accumulation": "2"}, "bf16, 8 ranks, ZeRO-3, 2 micro-batches"),
        ({"checkpoint_every": "1", "loss": "plain"}, "bf16, every layer recomputed, plain loss"),
        ({"checkpoint_every": "3"}, "bf16, one layer in 3 recomputed"),
        ({"implementation": "huggingface", "loss": "plain"}, "bf16, Hugging Face's model"),
        ({"ranks": "4", "split": "tensor=4", "stage": "0"}, "bf16, 4 ranks, `tensor=4`"),
        ({"ranks": "8", "zero": "3", "split": "shard_inside=4"}, "bf16, 8 ranks, ZeRO-3, `shard_inside=4`"),
        (
            {"ranks": "4", "split": "pipeline=4 schedule=gpipe", "stage": "2", "accumulation": "8"},
            "bf16, 4 ranks, `pipeline=4`, `schedule=gpipe`, stage 2, 8 micro-batches",
        ),
    ],
)
def test_settings_in_words(changes: dict[str, str], words: str) -> None:
    assert settings({**ROW, **changes}) == words


def test_no_table_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"measure with benchmarks/memory_truth\.py first"):
        newest(tmp_path / "absent.csv")


def test_the_pages_picture_is_of_todays_rows(tmp_path: Path) -> None:
    rows = newest(TRUTH)
    with (tmp_path / "newest.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    draw_truth(tmp_path / "newest.csv", tmp_path / "truth.png")
    drawn, kept = (words_of(folder / "truth.png") for folder in (tmp_path, ROOT / "docs" / "pictures"))
    assert drawn == kept, "draw it anew"


@pytest.mark.parametrize(
    ("speeds", "kept", "host_layer_ms"),
    [([2.0, 2.4], 1, 2.2), ([2.0, 3.0, 3.2], 2, 3.1), ([2.0, 3.0, 2.0, 3.0], 3, 2.5)],
    ids=["steady", "steady the second time", "never steady"],
)
def test_a_step_is_timed_beside_a_steady_host(
    monkeypatch: pytest.MonkeyPatch, speeds: list[float], kept: int, host_layer_ms: float
) -> None:
    """Milliseconds of a layer before a step and after each try; the try that counts, and the host's speed there."""
    hosts, tries = iter(speeds), iter([Measurement(number, number, 0.1, 0) for number in (1, 2, 3)])
    monkeypatch.setattr(memory_truth, "layer_launch_ms", lambda device: next(hosts))
    monkeypatch.setattr(memory_truth, "measure", lambda case: next(tries))
    case = Case(model="smollm2-135m", sequence_length=512, micro_batch=8)
    found, host = memory_truth._steadily(case)
    assert found.allocated_bytes == kept
    assert host == pytest.approx(host_layer_ms)
    assert next(hosts, None) is None
