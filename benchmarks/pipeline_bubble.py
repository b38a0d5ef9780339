"""Bubbles of real pipelines: who worked when in one step of every schedule, beside (K−1)/(K−1+vM).

Processes, messages, autograd and torch's schedules are real, and so are the timestamps. Only a layer's computing is a
sleep of known length (forward, as long again for the gradient of its input, and for that of its weights), as processes
that compute on fewer cores than there are ranks would wait for the cores. Rows go to
benchmarks/results/pipeline_bubble.csv, the picture of all recorded slots to docs/pictures/pipeline-recorded.png.

    python -m benchmarks.pipeline_bubble
    python -m benchmarks.pipeline_bubble --ranks 2 --micro-batches 4 --forward-ms 5 --dry-run
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rows import append_row
from tightfit.jobs.layout import Layout
from tightfit.launch.together import run_together
from tightfit.models.presets import preset
from tightfit.parallel.mesh import make_mesh
from tightfit.parallel.pipeline import Pipeline
from tightfit.prove.check_target import CheckTarget
from tightfit.prove.equivalence import TrainedModel, build_trained
from tightfit.report.pipeline import Record, draw_records, record_of
from tightfit.report.pipeline_schedule import SCHEDULES
from tightfit.train.pipeline_record import record

PIECES = 2
"""Stages of a rank under the schedules that have several."""
PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "pipeline-recorded.png"


def recorded_steps(device: torch.device, ranks: int, micro_batches: int, forward_s: float) -> list[dict[str, Any]]:
    """One recorded step of each schedule, on the first process."""
    return [recorded_step(device, made, micro_batches, forward_s) for made in layouts(ranks)]


def layouts(ranks: int) -> list[Layout]:
    """The same ranks under every schedule."""
    pieces = {"interleaved": PIECES, "zb-v": PIECES}
    return [Layout(pipeline=ranks, schedule=s, stages_per_rank=pieces.get(s, 1), micro_batch=1) for s in SCHEDULES]


def recorded_step(device: torch.device, layout: Layout, micro_batches: int, forward_s: float) -> dict[str, Any]:
    """The second step, as the first one connects the ranks."""
    target, pipeline, made = slowed_down(device, layout, micro_batches, forward_s)
    step(made, target)
    with record(pipeline, made.ranks) as found:
        step(made, target)
    return found


def slowed_down(
    device: torch.device, layout: Layout, micro_batches: int, forward_s: float
) -> tuple[CheckTarget, Pipeline, TrainedModel]:
    """A pipeline whose ranks take `forward_s` for a forward pass, twice that for a backward pass."""
    spec = replace(preset("tiny-llama"), layers=layout.pipeline * PIECES)
    target = CheckTarget(spec, layout, passes=micro_batches, length=8)
    made = build_trained(target, make_mesh(layout, device.type), device)
    assert isinstance(made.module, Pipeline)
    for stage in made.module.stages:
        slow_down([*stage.layers][-1], forward_s / layout.stages_per_rank)
    return target, made.module, made


def step(made: TrainedModel, target: CheckTarget) -> None:
    """One step that nobody looks at."""
    made.step(target, 1, lambda phase: None)


def slow_down(layer: Any, seconds: float) -> None:
    """A layer that sleeps where it would compute."""

    def sleep(_: object) -> None:
        time.sleep(seconds)

    def after(module: nn.Module, given: Any, made: tuple[Tensor, Any]) -> None:
        sleep(None)
        made[0].register_hook(sleep)

    layer.register_forward_hook(after)
    layer.attention.o.weight.register_hook(sleep)


def row(made: Record, forward_ms: float) -> dict[str, Any]:
    """What the results file keeps of a record."""
    return {
        "schedule": made.schedule,
        "ranks": made.ranks,
        "micro_batches": made.micro_batches,
        "pieces": made.pieces,
        "forward_ms": forward_ms,
        "waited": f"{made.waited:.4f}",
        "formula": f"{made.formula:.4f}",
    }


def main() -> None:
    """All schedules, a row each, and their picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--forward-ms", type=float, default=120.0)
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    options = parser.parse_args()
    settings = (options.ranks, options.micro_batches, options.forward_ms / 1e3)
    found = run_together(options.ranks, recorded_steps, *settings, modules=[record.__module__])
    records = [record_of(data) for data in found]
    for made in records:
        print(f"{made.schedule}: waited {made.waited:.1%}, (K−1)/(K−1+vM) is {made.formula:.1%}")
        if not options.dry_run:
            append_row("pipeline_bubble", row(made, options.forward_ms))
    if not options.dry_run:
        draw_records(records, PICTURE)


if __name__ == "__main__":
    main()
