"""The embedded job as `make run` runs it: what it prints, kept for the README, and a row of how it went.

python -m benchmarks.default_run          (two to three minutes on two quiet cores)
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.rows import PICTURES, RESULTS, append_row

PICTURE = PICTURES / "stdlib-loss.png"
FACTS = {
    "steps": r"steps +(\d+) of",
    "start_loss": r"held-out loss +([\d.]+) →",
    "end_loss": r"→ ([\d.]+) nats",
    "tokens_per_second": r"speed +([\d,]+) tokens",
    "train_seconds": r"over (\d+) s",
    "peak_memory": r"peak memory +(.+?) *$",
}


def main(folder: Path, commit: str | None) -> None:
    """Run it in the repository's root, keep its screen, its curve and its figures."""
    root = Path(__file__).parents[1]
    began = time.perf_counter()
    command = [sys.executable, "-m", "tightfit", "train", "--overwrite"]
    environment = {**os.environ, "COLUMNS": "80"}
    screen = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = {name: re.search(pattern, screen, flags=re.MULTILINE) for name, pattern in FACTS.items()}
    row = {name: match[1].replace(",", "") if match else "" for name, match in found.items()}
    append_row("default_run", {**row, "wall_s": f"{time.perf_counter() - began:.0f}"}, folder=folder, commit=commit)
    (folder / "default_run.txt").write_text("\n".join(line.rstrip() for line in screen.splitlines()) + "\n")
    shutil.copyfile(root / "runs" / "stdlib" / "loss.png", PICTURE)
    print(screen, row)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the row where this is not a git checkout")
    chosen = parser.parse_args()
    main(chosen.results, chosen.commit)
