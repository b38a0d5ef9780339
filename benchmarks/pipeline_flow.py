"""Several steps in a row of real pipelines: 1F1B, which is flushed after each, and 2BW, which is not.

As pipeline_bubble.py: processes, messages and autograd are real, a layer's computing is a sleep of known length. The
record begins with an empty pipeline and ends with one. Rows go to benchmarks/results/pipeline_flow.csv, the picture to
docs/pictures/pipeline-flow.png.

    python -m benchmarks.pipeline_flow
    python -m benchmarks.pipeline_flow --ranks 2 --micro-batches 2 --steps 2 --forward-ms 5 --dry-run
"""

import argparse
from typing import Any

import torch

from benchmarks.pipeline_bubble import slowed_down, step
from benchmarks.rows import PICTURES, append_row
from tightfit.jobs.layout import Layout, PipelineSchedule
from tightfit.launch.together import run_together
from tightfit.report.pipeline import Record, draw_records, record_of
from tightfit.train.pipeline_record import record
from tightfit.train.step import ignore

COMPARED: tuple[PipelineSchedule, ...] = ("1f1b", "2bw")
PICTURE = PICTURES / "pipeline-flow.png"


def recorded_flows(
    device: torch.device, ranks: int, micro_batches: int, steps: int, forward_s: float
) -> list[dict[str, Any]]:
    """The same steps of each schedule, on the first process."""
    made = [Layout(pipeline=ranks, schedule=schedule, micro_batch=1) for schedule in COMPARED]
    return [recorded_flow(device, layout, micro_batches, steps, forward_s) for layout in made]


def recorded_flow(
    device: torch.device, layout: Layout, micro_batches: int, steps: int, forward_s: float
) -> dict[str, Any]:
    """`steps` steps after one that connects the ranks."""
    target, pipeline, made = slowed_down(device, layout, micro_batches, forward_s)
    step(made, target)
    buffered = made.optimizer.buffered
    with record(pipeline, made.ranks) as found:
        for _ in range(steps):
            if buffered is None:
                step(made, target)
            else:
                buffered.take(target.micro_batches(1), device, target.settings.lr, ignore, made.ranks)
        if buffered is not None:
            buffered.finish(ignore, made.ranks)
    return found


def row(made: Record, forward_ms: float) -> dict[str, Any]:
    """What the results file keeps of a record."""
    return {
        "schedule": made.schedule,
        "ranks": made.ranks,
        "micro_batches": made.micro_batches,
        "steps": made.steps,
        "forward_ms": forward_ms,
        "seconds": f"{max(timed.end for timed in made.tasks):.3f}",
        "waited": f"{made.waited:.4f}",
        "formula": f"{made.formula:.4f}",
    }


def main() -> None:
    """Both schedules, a row each, and their picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--forward-ms", type=float, default=250.0)
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    options = parser.parse_args()
    settings = (options.ranks, options.micro_batches, options.steps, options.forward_ms / 1e3)
    found = run_together(options.ranks, recorded_flows, *settings, modules=[record.__module__])
    records = [record_of(data) for data in found]
    for made in records:
        print(f"{made.schedule}: waited {made.waited:.1%}, the formula says {made.formula:.1%}")
        if not options.dry_run:
            append_row("pipeline_flow", row(made, options.forward_ms))
    if not options.dry_run:
        draw_records(records, PICTURE)


if __name__ == "__main__":
    main()
