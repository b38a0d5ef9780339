"""Work that takes long says so; work that does not says nothing."""

import io
import re
import time

import pytest

from tightfit.report import waiting
from tightfit.report.waiting import waiting as told


def own_stderr(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Called by a test itself: pytest sets its own one when a test begins."""
    made = io.StringIO()
    monkeypatch.setattr("sys.stderr", made)
    return made


def await_words(stderr: io.StringIO, times: int) -> None:
    """Until the work is named so often; a busy machine may take its time over that."""
    limit = time.monotonic() + 60
    while stderr.getvalue().count("long work") < times and time.monotonic() < limit:
        time.sleep(0.01)


def test_only_long_work_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = own_stderr(monkeypatch)
    with told("nothing much"):
        pass
    assert stderr.getvalue() == ""
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.01)
    with told("long work"):
        await_words(stderr, 1)
    assert stderr.getvalue() == "tightfit: long work …\n"


def test_a_terminal_counts_seconds_and_is_left_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = own_stderr(monkeypatch)
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.01)
    monkeypatch.setattr(waiting, "TICK_S", 0.01)
    monkeypatch.setattr(stderr, "isatty", lambda: True)
    with told("long work"):
        await_words(stderr, 2)
    assert re.match(r"(\rlong work … \d+ s){2,}", stderr.getvalue())
    assert stderr.getvalue().endswith("\r\x1b[K")
