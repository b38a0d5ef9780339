"""benchmarks/fsdp_ratio.py runs, which it does only while our losses are those of torch's plain FSDP2."""

import re
import subprocess
import sys

from tightfit.report.documentation import ROOT


def test_losses_agree_and_ratios_come_out() -> None:
    script = str(ROOT / "benchmarks" / "fsdp_ratio.py")
    small = ["--model", "tiny-llama", "--rows", "1", "--length", "16", "--pairs", "2", "--dry-run"]
    done = subprocess.run([sys.executable, script, *small], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["zero 3", "zero 2"]
    assert all(float(re.findall(r"\d+\.\d+", line)[0]) > 0 for line in lines)
