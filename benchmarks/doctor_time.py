"""How long `tightfit doctor` takes on CPU processes, from the command to the verdict, on a machine new to it.

Everything is examined and one device measured, as on the first day. A row for each number of ranks goes to
benchmarks/results/doctor_time.csv, with the splits that were checked and those that no time was left for.

    python -m benchmarks.doctor_time --ranks 4 8
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.rows import RESULTS, append_row


def examined(ranks: int) -> dict[str, Any]:
    """The values of a row."""
    with tempfile.TemporaryDirectory() as unknown:
        command = [sys.executable, "-m", "tightfit", "doctor", "--ranks", str(ranks), "--json"]
        environment = {**os.environ, "XDG_CONFIG_HOME": unknown}
        began = time.perf_counter()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        wall_s = time.perf_counter() - began
    told = json.loads(done.stdout)
    splits = [each for each in told["findings"] if each["words"].startswith("as one process")]
    left = [each["words"] for each in told["findings"] if each["words"].startswith("no time was left")]
    return {
        "ranks": ranks,
        "cores": os.cpu_count(),
        "splits": len(splits),
        "left_out": "; ".join(left),
        "wall_s": f"{wall_s:.0f}",
        "healthy": told["healthy"],
        "warnings": done.stderr.count("Warning"),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    chosen = parser.parse_args()
    for number in chosen.ranks:
        row = examined(number)
        print(row, flush=True)
        append_row("doctor_time", row, folder=chosen.results, commit=chosen.commit)
