"""benchmarks/fsdp_ratio.py runs, which it does only while our losses are those of torch's plain FSDP2."""

import re
import sys

import pytest

from benchmarks import fsdp_ratio


@pytest.mark.thorough
@pytest.mark.usefixtures("server")
def test_losses_agree_and_ratios_come_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--model", "tiny-llama", "--rows", "1", "--length", "16", "--pairs", "2", "--dry-run"]
    monkeypatch.setattr(sys, "argv", ["fsdp_ratio.py", *small])
    fsdp_ratio.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["zero 3", "zero 2"]
    assert all(float(re.findall(r"\d+\.\d+", line)[0]) > 0 for line in lines)
