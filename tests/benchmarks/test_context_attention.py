"""benchmarks/context_attention.py runs every layout and tells rates beside one rank's."""

import sys

import pytest

from benchmarks import context_attention


def test_every_layout_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["context_attention.py", "--length", "64", "--device", "cpu", "--dry-run"])
    monkeypatch.setattr(context_attention, "LAYOUTS", [(2, 1), (4, 2), (2, 2)])
    context_attention.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all("'share'" in line for line in lines)
