"""The default job, trained whole under 1F1B and under 2BW: its losses and its held-out losses beside each other.

`tightfit launch` starts each run on two processes with half of the layers; everything but the split is the job's own,
and the seed with it. A row for each goes to benchmarks/results/pipeline_default.csv, the curves to
docs/pictures/pipeline-default.png. pipeline_convergence.py does the same with fewer, larger steps.

    python -m benchmarks.pipeline_default
    python -m benchmarks.pipeline_default --steps 40 --results results
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import tightfit.jobs
from benchmarks.convergence import COLORS, LAST
from benchmarks.rows import RESULTS, append_row, picture_folder
from tightfit.report.curves import smoothed
from tightfit.report.figure import panels
from tightfit.train.metrics import METRICS_FILE

JOB = Path(tightfit.jobs.__file__).parent / "stdlib.yaml"
LAYOUT = {"pipeline": 2, "micro_batch": 2}
SCHEDULES = ("1f1b", "2bw")


@dataclass(frozen=True)
class Run:
    """Losses by step, of training and of held-out text."""

    training: dict[int, float]
    held_out: dict[int, float]

    @classmethod
    def read(cls, file: Path) -> "Run":
        """From a run's metrics."""
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        training = {row["step"]: row["loss"] for row in rows if "loss" in row}
        held_out = {row["step"]: row["held_out_loss"] for row in rows if "held_out_loss" in row}
        return cls(training, held_out)


def trained(schedule: str, folder: Path, steps: int | None) -> Run:
    """The default job under a schedule."""
    output = folder / schedule
    changes: dict[str, Any] = {"output": str(output), "layout.schedule": schedule}
    changes |= {f"layout.{name}": value for name, value in LAYOUT.items()}
    changes |= {"steps": steps} if steps else {}
    options = [word for name, value in changes.items() for word in ("-o", f"{name}={value}")]
    subprocess.run([sys.executable, "-m", "tightfit", "launch", str(JOB), *options], check=True)
    return Run.read(output / METRICS_FILE)


def row_of(schedule: str, run: Run, first: Run) -> dict[str, Any]:
    """What a run's row says of it."""
    steps = sorted(run.training)
    apart = [run.training[step] - first.training[step] for step in steps]
    last = max(run.held_out)
    return {
        "schedule": schedule,
        "ranks": LAYOUT["pipeline"],
        "steps": steps[-1],
        "final_loss": f"{mean(run.training[step] for step in steps[-LAST:]):.4f}",
        "held_out_loss": f"{run.held_out[last]:.4f}",
        "held_out_above_first": f"{run.held_out[last] - first.held_out[last]:.4f}",
        "mean_difference": f"{mean(map(abs, apart)):.4f}",
    }


def draw(runs: dict[str, Run], path: Path) -> None:
    """Training losses as lines, held-out ones as points."""
    with panels(path, 1, 1, width=8, height=4.5) as (_, grid):
        axes = grid[0][0]
        for (schedule, run), color in zip(runs.items(), COLORS, strict=False):
            steps = sorted(run.training)
            losses = smoothed([run.training[step] for step in steps])
            axes.plot(steps, losses, label=schedule, color=color, linewidth=1.1)
            axes.plot(*zip(*sorted(run.held_out.items()), strict=True), "o", color=color, markersize=4)
        axes.set(xlabel="step", ylabel="loss (moving average; points: held-out)", title="The default job on two stages")
        axes.legend(frameon=False)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Both runs, a row each, and their curves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    parser.add_argument("--steps", type=int, help="other than the job's")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = {schedule: trained(schedule, Path(folder), chosen.steps) for schedule in SCHEDULES}
    for schedule, run in runs.items():
        row = row_of(schedule, run, runs[SCHEDULES[0]])
        print(row, flush=True)
        append_row("pipeline_default", row, folder=chosen.results, commit=chosen.commit)
    draw(runs, picture_folder(chosen.results) / "pipeline-default.png")


if __name__ == "__main__":
    main()
