"""Measuring a machine: what is kept is what the clock said, in rates a plan can count with."""

import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.serve.little_timing import measure_little
from tightfit.cli.main import app
from tightfit.hardware.calibration import CPU, read_calibrations
from tightfit.prove import calibrate as module
from tightfit.prove.rates import copy_ms, products
from tightfit.prove.timing import timed_ms

DEVICE = torch.device("cpu")


def test_the_verb_measures_and_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(module, "LARGEST", {"cpu": 256})
    monkeypatch.setattr(module, "SECONDS", {"cpu": 0.01})
    monkeypatch.setattr(module, "_count", lambda device, count: 2**16)
    measure_little(monkeypatch)
    result = CliRunner().invoke(app, ["calibrate", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "products in fp32" in result.output
    found = read_calibrations()[CPU]
    rates = [*found.products_tflop_s.values(), *found.attention_tflop_s["fp32"], found.copy_gb_s, found.link_gb_s]
    assert all(math.isfinite(rate) and rate > 0 for rate in (*rates, found.host_adam_params_s))
    assert found.serving is not None
    assert found.serving.product_ns("fp32", 1) > 0
    shown = CliRunner().invoke(app, ["hardware"])
    assert "measured on cpu" in shown.output


def test_work_is_counted_by_hand() -> None:
    made = list(products(DEVICE, torch.float32, 8, 16, 32))
    assert [each.name for each in made] == ["y", "dx", "dW"]
    assert {each.tflop for each in made} == {2 * 8 * 16 * 32 * 1e-12}
    assert made[0].gb == pytest.approx(4 * (8 * 32 + 8 * 16 + 16 * 32) / 1e9)
    assert copy_ms(DEVICE, 1024)[1] == pytest.approx(2 * 4096 / 1e9)


def test_many_calls_are_timed_together() -> None:
    calls: list[int] = []
    assert timed_ms(lambda: calls.append(1), DEVICE) >= 0
    assert len(calls) > 3
