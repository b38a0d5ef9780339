"""Work that takes long says so; work that does not says nothing."""

import re
import time

import pytest

from tightfit.report import waiting
from tightfit.report.waiting import waiting as told


def said(capfd: pytest.CaptureFixture[str], times: int) -> str:
    """What has been written once it names the work so often; a busy machine may take its time over that."""
    text, limit = "", time.monotonic() + 60
    while text.count("long work") < times and time.monotonic() < limit:
        text += capfd.readouterr().err
        time.sleep(0.01)
    return text


def test_only_long_work_is_told(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with told("nothing much"):
        pass
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.01)
    with told("long work"):
        text = said(capfd, 1)
    assert text + capfd.readouterr().err == "tightfit: long work …\n"


def test_a_terminal_counts_seconds_and_is_left_clean(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.01)
    monkeypatch.setattr(waiting, "TICK_S", 0.01)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with told("long work"):
        text = said(capfd, 2)
    seen = text + capfd.readouterr().err
    assert re.match(r"(\rlong work … \d+ s){2,}", seen)
    assert seen.endswith("\r\x1b[K")
