"""The script that times a layer of a decoding step."""

import csv
import sys
from pathlib import Path

import pytest

from benchmarks import decode_step


def test_a_tiny_run_leaves_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["decode_step", "--tiny", "--results", str(tmp_path)])
    decode_step.main()
    (row,) = csv.DictReader((tmp_path / "decode_step.csv").open())
    assert row["norms_in_products"] == "False"
    assert float(row["us_a_layer"]) > 0
    assert float(row["error"]) < 1e-6
