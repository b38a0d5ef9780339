"""benchmarks/pipeline_bubble.py runs every schedule and tells its bubble beside the formula's."""

import subprocess
import sys

from tightfit.report.documentation import ROOT


def test_every_schedule_is_recorded() -> None:
    script = str(ROOT / "benchmarks" / "pipeline_bubble.py")
    small = ["--ranks", "2", "--micro-batches", "4", "--forward-ms", "5", "--dry-run"]
    done = subprocess.run([sys.executable, script, *small], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    told = {line.partition(":")[0]: line.rpartition("is ")[2] for line in done.stdout.splitlines()}
    assert told == {"gpipe": "20.0%", "1f1b": "20.0%", "interleaved": "11.1%", "zero-bubble": "20.0%"}
