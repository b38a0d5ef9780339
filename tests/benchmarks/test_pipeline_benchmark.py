"""benchmarks/pipeline_bubble.py runs every schedule and tells its bubble beside the formula's; pipeline_flow.py several
steps of two."""

import sys

import pytest

from benchmarks import pipeline_bubble, pipeline_flow


@pytest.mark.thorough
@pytest.mark.usefixtures("server")
def test_every_schedule_is_recorded(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--ranks", "2", "--micro-batches", "4", "--forward-ms", "5", "--dry-run"]
    monkeypatch.setattr(sys, "argv", ["pipeline_bubble.py", *small])
    pipeline_bubble.main()
    told = {line.partition(":")[0]: line.rpartition("is ")[2] for line in capsys.readouterr().out.splitlines()}
    assert told == {"gpipe": "20.0%", "1f1b": "20.0%", "interleaved": "11.1%", "zero-bubble": "20.0%", "zb-v": "11.1%"}


@pytest.mark.usefixtures("server")
def test_steps_in_a_row_are_recorded(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps of two micro-batches: (K−1)/(K−1+M) of the time with a flush between them, (K−1)/(K−1+2M) without."""
    small = ["--ranks", "2", "--micro-batches", "2", "--steps", "2", "--forward-ms", "5", "--dry-run"]
    monkeypatch.setattr(sys, "argv", ["pipeline_flow.py", *small])
    pipeline_flow.main()
    told = {line.partition(":")[0]: line.rpartition("says ")[2] for line in capsys.readouterr().out.splitlines()}
    assert told == {"1f1b": "33.3%", "2bw": "20.0%"}
