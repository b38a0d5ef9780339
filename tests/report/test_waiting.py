"""Work that takes long says so; work that does not says nothing."""

import time

import pytest

from tightfit.report import waiting
from tightfit.report.waiting import waiting as told


def test_only_long_work_is_told(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with told("nothing much"):
        pass
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.01)
    with told("long work"):
        time.sleep(0.3)
    assert capfd.readouterr().err == "tightfit: long work …\n"


def test_a_terminal_counts_seconds_and_is_left_clean(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.01)
    monkeypatch.setattr(waiting, "TICK_S", 0.01)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with told("long work"):
        time.sleep(0.3)
    seen = capfd.readouterr().err
    assert seen.startswith("\rlong work … 0 s\rlong work … ")
    assert seen.endswith("\r\x1b[K")
