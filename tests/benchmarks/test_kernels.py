"""`python -m benchmarks.kernels` on tiny shapes: its table, rows, picture, and one sentence for every mistake."""

import csv
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.kernels import app
from benchmarks.operations import elementwise
from benchmarks.operations import run as kernels
from benchmarks.operations.run import OPERATIONS
from tightfit.errors import UserError


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's times tell nothing; only that there are some."""
    monkeypatch.setattr(kernels, "ROUNDS", 2)
    monkeypatch.setattr(kernels, "FEWEST_ROUNDS", 2)


def test_every_operation_runs_and_agrees_with_eager() -> None:
    outcome = CliRunner().invoke(app, ["--device", "cpu", "--json"])
    assert outcome.exit_code == 0, outcome.output
    found = json.loads(outcome.stdout)
    assert found["limits"]["copy_gb_s"] > 0
    measurements = found["measurements"]
    assert {m["operation"] for m in measurements} == set(OPERATIONS)
    for m in measurements:
        assert m["note"] == "needs a GPU" if m["timing"] is None else m["difference"] < 1e-5
        assert m["timing"] is None or m["timing"]["p20_ms"] <= m["timing"]["p50_ms"] <= m["timing"]["p80_ms"]
    for operation in OPERATIONS:
        timed = {m["peer"] for m in measurements if m["operation"] == operation and m["timing"]}
        assert {"eager", "tightfit"} <= timed


def test_table_rows_and_picture(tmp_path: Path) -> None:
    for _ in range(2):
        arguments = ["--device", "cpu", "--op", "rms_norm", "--results", str(tmp_path)]
        outcome = CliRunner().invoke(app, [*arguments, "--commit", "0123abc"])
        assert outcome.exit_code == 0, outcome.output
    for word in ("limits measured here", "rms_norm  8×24 + residual  float32", "Liger", "needs a GPU", "kernels.csv"):
        assert word in outcome.stdout
    with (tmp_path / "kernels.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 12
    assert {row["commit"] for row in rows} == {"0123abc"}
    assert all(float(row["ms_p50"]) > 0 for row in rows if row["peer"] == "tightfit")
    assert (tmp_path / "kernels-norms.png").read_bytes().startswith(b"\x89PNG")


def test_one_peer_alone_is_still_compared_with_eager() -> None:
    arguments = ["--device", "cpu", "--json", "--op", "rms_norm", "--op", "linear_cross_entropy"]
    outcome = CliRunner().invoke(app, [*arguments, "--peer", "tightfit", "--peer", "CCE torch_compile"])
    assert outcome.exit_code == 0, outcome.output
    found = json.loads(outcome.stdout)["measurements"]
    assert [m["peer"] for m in found] == ["tightfit"] * 2 + ["CCE torch_compile", "tightfit"] * 3
    assert all(0 < m["difference"] < 1e-5 for m in found if m["timing"] and m["operation"] == "linear_cross_entropy")


def test_a_peer_that_breaks_is_noted_and_a_run_cut_short_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def broken(*_: object, **__: object) -> None:
        raise NotImplementedError("not here")

    monkeypatch.setattr(elementwise, "rope", broken)
    monkeypatch.setattr(elementwise, "glu_eager", interrupted)
    arguments = ["--device", "cpu", "--op", "rope", "--op", "glu", "--results", str(tmp_path)]
    assert CliRunner().invoke(app, arguments).exit_code != 0
    with (tmp_path / "kernels.csv").open(encoding="utf-8") as file:
        notes = {row["peer"]: row["note"] for row in csv.DictReader(file)}
    assert notes["tightfit"] == "NotImplementedError: not here"
    assert notes["eager"] == ""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--device", "cpu", "--op", "softmax"], "--op is 'softmax'; give one of rms_norm, "),
        (["--device", "cpu", "--op", "rope", "--peer", "triton"], "--peer is 'triton'; give one of 'eager', "),
        (["--device", "tpu"], "--device is 'tpu'; give cuda or cpu"),
        ([], "needs a CUDA GPU and none is here"),
    ],
)
def test_mistakes(arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    outcome = CliRunner().invoke(app, arguments)
    assert isinstance(outcome.exception, UserError)
    assert sentence in str(outcome.exception)
