"""The bar of compressing: layer, error and time left on a terminal, plain lines in a pipe, nothing if it is quiet."""

import io
import re

import pytest
from rich.console import Console

from tightfit.compress.report import LayerReport
from tightfit.report import compression
from tightfit.report.compression import CompressionProgress

SLOW_S = 40.0
"""A layer of a large model; rich by itself forgets after 30 s what it would reckon the speed by."""
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def shown(monkeypatch: pytest.MonkeyPatch, *, on_terminal: bool, quiet: bool = False) -> list[str]:
    """What three of five layers leave, by a clock of ours: every state of the bar, or every line."""
    stream, now = io.StringIO(), [0.0]

    def console(stderr: bool, quiet: bool) -> Console:
        assert stderr, "what a command prints goes into pipes"
        return Console(file=stream, force_terminal=on_terminal, quiet=quiet, width=100)

    monkeypatch.setattr(compression, "Console", console)
    with CompressionProgress(quiet=quiet) as progress:
        progress._bar.get_time = lambda: now[0]
        for done, error in ((1, 0.0123), (2, 0.5), (3, None)):
            now[0] += SLOW_S
            progress.layer(done, 5, LayerReport(done - 1, {}, error, SLOW_S))
            progress._bar.refresh()
    return [line.strip() for line in re.split(r"[\r\n]+", CONTROL.sub("", stream.getvalue())) if line.strip()]


def test_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    states = shown(monkeypatch, on_terminal=True)
    assert [state for state in states if re.search(r"^layer 1/5 .*error 1\.23e-02 left", state)]
    assert [state for state in states if re.search(r"^layer 2/5 .*error 5\.00e-01 left 0:02:00$", state)]
    assert re.search(r"^layer 3/5 [^a-z]*left 0:01:20$", states[-1]), "two layers of 40 s; the last had no error"


def test_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, on_terminal=False) == [
        "layer 1/5  error 1.23e-02  40.0 s",
        "layer 2/5  error 5.00e-01  40.0 s",
        "layer 3/5    40.0 s",
    ]


@pytest.mark.parametrize("on_terminal", [True, False])
def test_quiet(on_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, on_terminal=on_terminal, quiet=True) == []
