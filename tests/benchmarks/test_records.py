"""Records as tables: newest rows beside peers and predictions, runs out of memory kept, mistakes in a sentence."""

import csv
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reports.records import LENGTHS, allocator_rows, curve_rows, long_rows, measured_at, record_rows
from tests.plan.questions import planned
from tightfit.errors import UserError

COMMON = {
    "device": "NVIDIA H200",
    "torch": "2.11.0",
    "commit": "abc",
    "implementation": "tightfit",
    "layers": "32",
    "levers": "",
    "fitted": "0",
    "model": "",
    "rows": "",
    "sequence_length": "",
    "precision": "",
    "allocator": "",
    "predicted_s": "",
    "predicted_gib": "",
    "result": "ok",
    "step_s": "1.0",
    "tokens_per_second": "8192",
    "peak_allocated_gib": "10.0",
    "peak_reserved_gib": "12.0",
    "host_gib": "0.000",
    "device_mallocs": "0",
    "device_frees": "0",
}


def written(path: Path, *rows: dict[str, Any]) -> Path:
    made = [COMMON | row for row in rows]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(made[0]))
        writer.writeheader()
        writer.writerows(made)
    return path


def test_newest_rows_beside_peers_and_predictions(tmp_path: Path) -> None:
    shape = {"model": "llama-3.2-3b", "layers": "28", "rows": "1", "sequence_length": "8192", "precision": "bf16"}
    away = {"levers": "offload=optimizer update_in_backward=True", "host_gib": "35.906"}
    path = written(
        tmp_path / "levers.csv",
        {"case": "8b-24gb", "fitted": "1", "levers": "checkpoint_every=1"},
        {"case": "8b-24gb", "fitted": "1", "levers": "offload_keep_bytes=5000000000"},
        {"case": "3b-offload", **away, "step_s": "2.0"},
        {
            "case": "3b-offload",
            "implementation": "deepspeed",
            "levers": "checkpoint_every=1",
            "result": "out of memory",
        },
        {"case": "3b-offload", **away, "step_s": "0.918", "predicted_s": "0.781", "predicted_gib": "10.23", **shape},
        {"case": "not-a-record"},
    )
    header, rows = record_rows(path)
    assert all(len(row) == len(header) for row in rows)
    assert header[-1] == "costs today"
    today = float(rows[0][-1].removesuffix(" s"))
    pins = [f"levers.{each}" for each in (*away["levers"].split(), "offload_keep_bytes=0", "checkpoint_every=0")]
    plan = planned("llama-3.2-3b", "H200", 8192, 1, "layout.micro_batch=1", *pins, host="125GB", precision="bf16").plan
    assert today == pytest.approx(plan.time.step_s, rel=0.005)
    assert [row[-1] for row in rows[1:]] == ["–", "–"]
    assert [tuple(row[:-1]) for row in rows] == [
        (
            "3B, 8,192 tokens, float32 states",
            "`offload=optimizer`, `update_in_backward=true`",
            "0.918 s",
            "8,192",
            "10.0 GiB",
            "35.9 GiB",
            "0.781 s, 10.2 GiB",
        ),
        ("3B, 8,192 tokens, float32 states", "DeepSpeed ZeRO-3, layers recomputed", "out of memory", *("–" * 4)),
        (
            "8B, 2,048 tokens, float32 states, in 24 GB",
            "`--fit`: `offload_keep_bytes=5e9`",
            "1 s",
            "8,192",
            "10.0 GiB",
            "–",
            "–",
        ),
    ]
    assert measured_at(path) == "Measured on one NVIDIA H200, torch 2.11.0; commits `abc`."


def test_segments_beside_each_other(tmp_path: Path) -> None:
    expandable = {"allocator": "expandable_segments:True", "peak_reserved_gib": "10.1", "device_mallocs": "3"}
    path = written(tmp_path / "levers.csv", {"case": "1b-allocator"}, {"case": "1b-allocator", **expandable})
    _, rows = allocator_rows(path)
    assert [tuple(row[1:6]) for row in rows] == [
        ("torch's default", "10.00 GiB", "12.00 GiB", "0", "0"),
        ("expandable", "10.00 GiB", "10.10 GiB", "3", "0"),
    ]


def test_curves_in_numbers(tmp_path: Path) -> None:
    numbers = {
        "state_bytes_per_parameter": "6.0412",
        "final_loss": "5.7487",
        "above_first": "0.0049",
        "largest_difference": "0.2",
        "update_ms_p50": "1.25",
        "step_ms_p50": "40.4",
    }
    path = written(
        tmp_path / "optimizer_states.csv",
        {"states": "8bit", **numbers, "final_loss": "9"},
        {"states": "8bit", **numbers},
        {"states": "bf16", **numbers, "device": "aarch64 CPU"},
    )
    header, rows = curve_rows(path, "states")
    assert header[0] == "states"
    assert [tuple(row) for row in rows] == [("8bit", "6.04", "5.7487", "+0.005", "0.200", "1.2 ms", "40 ms")]


def test_mistakes_get_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*none\.csv .*run benchmarks/levers\.py first"):
        record_rows(tmp_path / "none.csv")
    with pytest.raises(UserError, match=r"run benchmarks/fp8_convergence\.py first"):
        curve_rows(tmp_path / "fp8_convergence.csv", "matmul")


def test_every_gib_of_a_long_row() -> None:
    """Checkpoints by hand: an input of 4096 bf16 numbers a token and layer; what the host has no room for stays."""
    header, rows = long_rows()
    table = {row[0]: [0.0 if cell == "–" else float(cell.split()[0]) for cell in row[1:]] for row in rows}
    assert len(header) == 1 + 2 * len(LENGTHS)
    each = [length * 4096 * 2 / 2**30 for length in LENGTHS]
    assert table["activations"][1] == 31 * each[0]
    assert table["activations"][3] == 90 // each[1] * each[1]
    assert table["weights"][0] == pytest.approx(8.03e9 * 2 / 2**30, rel=1e-3)
    for column in range(4):
        parts = sum(cells[column] for name, cells in table.items() if name != "together")
        assert parts == pytest.approx(table["together"][column], abs=0.05)
    assert table["together"][2] < 139
    assert table["together"][3] < 110
