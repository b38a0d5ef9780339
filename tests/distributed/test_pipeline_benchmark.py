"""benchmarks/pipeline_bubble.py runs every schedule and tells its bubble beside the formula's."""

import importlib
import sys

import pytest

from tightfit.report.documentation import ROOT


@pytest.mark.usefixtures("server")
def test_every_schedule_is_recorded(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--ranks", "2", "--micro-batches", "4", "--forward-ms", "5", "--dry-run"]
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(sys, "argv", ["pipeline_bubble.py", *small])
    importlib.import_module("pipeline_bubble").main()
    told = {line.partition(":")[0]: line.rpartition("is ")[2] for line in capsys.readouterr().out.splitlines()}
    assert told == {"gpipe": "20.0%", "1f1b": "20.0%", "interleaved": "11.1%", "zero-bubble": "20.0%"}
