"""The same steps on real text under 1F1B and under 2BW, whose gradients are of weights one update old.

Two processes hold half of the layers of nano-llama each, with a step of four micro-batches; weights and batches are the
same in both runs (convergence.py says which). A row for each goes to benchmarks/results/pipeline_convergence.csv, the
curves to docs/pictures/pipeline_convergence.png.

    python -m benchmarks.pipeline_convergence
    python -m benchmarks.pipeline_convergence --steps 4 --seq 32 --results results
"""

import time
from collections.abc import Sequence
from itertools import islice
from statistics import mean, median

import torch

from benchmarks.convergence import BATCH, LAST, SETTINGS, Curve, Study, Variant, draw, parsed, shallow, text_rows
from benchmarks.rows import append_row, picture_folder
from tightfit.jobs.job import Schedule
from tightfit.jobs.layout import Layout, PipelineSchedule
from tightfit.jobs.levers import Levers
from tightfit.launch.together import run_together
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.spec import ModelSpec
from tightfit.parallel.mesh import make_mesh
from tightfit.parallel.ranks import Ranks
from tightfit.train.assembly import assemble, unfilled
from tightfit.train.data.dataset import PackedText
from tightfit.train.data.loader import make_loader
from tightfit.train.precision import LossScale
from tightfit.train.schedule import lr_ratio
from tightfit.train.step import Batch, StepResult, ignore, train_step

RANKS, MICRO_BATCH = 2, 2
SCHEDULES: tuple[PipelineSchedule, ...] = ("1f1b", "2bw")
MODEL = "nano-llama"
STUDY = Study(
    name="pipeline_convergence",
    column="schedule",
    title="a pipeline with and without a flush",
    variants=dict.fromkeys(SCHEDULES, Variant()),
)


def trained(device: torch.device, schedule: PipelineSchedule, spec: ModelSpec, text: Batch) -> Curve:
    """As one of the ranks; tensors of `text` are [steps, micro-batches, rows, tokens]."""
    layout = Layout(pipeline=RANKS, schedule=schedule, micro_batch=MICRO_BATCH)
    mesh, milliseconds, told = make_mesh(layout, device.type), list[float](), list[StepResult | None]()
    ranks = Ranks.of(mesh)
    steps, micro_batches, _, length = text["tokens"].shape
    model = unfilled(spec, layout, "fp32", device)
    module, optimizer = assemble(model, mesh, layout, Levers(), "fp32", SETTINGS, device, filled, length=length)
    for number in range(steps):
        batches = [{name: rows[number, at] for name, rows in text.items()} for at in range(micro_batches)]
        lr = SETTINGS.lr * lr_ratio(Schedule(warmup_steps=steps // 4), number, steps)
        began = time.perf_counter()
        if optimizer.buffered is None:
            told.append(train_step(module, optimizer, batches, device, lr, LossScale(), ranks=ranks))
        else:
            told.append(optimizer.buffered.take(batches, device, lr, ignore, ranks))
        milliseconds.append(1e3 * (time.perf_counter() - began))
    if optimizer.buffered is not None:
        told.append(optimizer.buffered.finish(ignore, ranks))
    losses = [result.loss for result in told if result is not None]
    return Curve(losses, state_bytes=0.0, step_ms=median(milliseconds), update_ms=0.0)


def text_of(rows: PackedText, steps: int) -> Batch:
    """The batches of all steps, [steps, micro-batches, rows, tokens]."""
    micro_batches = BATCH // MICRO_BATCH
    found = list(islice(iter(make_loader(rows, micro_batch=MICRO_BATCH, seed=0)), steps * micro_batches))
    return {name: torch.stack([each[name] for each in found]).unflatten(0, (steps, micro_batches)) for name in found[0]}


def filled(model: Decoder) -> None:
    """With weights of one seed."""
    torch.manual_seed(0)
    init_weights(model)


def row_of(schedule: str, curve: Curve, first: Curve) -> dict[str, str]:
    """What a run's row says of it."""
    apart = curve.above(first)
    return {
        "schedule": schedule,
        "final_loss": f"{mean(curve.losses[-LAST:]):.4f}",
        "above_first": f"{mean(apart[-LAST:]):.4f}",
        "mean_difference": f"{mean(map(abs, apart)):.4f}",
        "largest_difference": f"{max(map(abs, apart)):.4f}",
        "step_ms_p50": f"{curve.step_ms:.1f}",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Both schedules, a row each, and their curves."""
    chosen = parsed(STUDY, arguments)
    spec = shallow(chosen.model or MODEL)
    text = text_of(text_rows(spec, chosen.seq), chosen.steps)
    common = {
        "model": chosen.model or MODEL,
        "layers": spec.layers,
        "ranks": RANKS,
        "steps": chosen.steps,
        "sequence_length": chosen.seq,
        "batch": BATCH,
    }
    curves: dict[str, Curve] = {}
    for schedule in SCHEDULES:
        curves[schedule] = run_together(RANKS, trained, schedule, spec, text)
        row = common | row_of(schedule, curves[schedule], curves[SCHEDULES[0]])
        print(row, flush=True)
        append_row(STUDY.name, row, folder=chosen.results, commit=chosen.commit)
    picture = picture_folder(chosen.results) / f"{STUDY.name}.png"
    draw(STUDY, curves, picture, f"{MODEL}: the same {chosen.steps} steps, {STUDY.title}")


if __name__ == "__main__":
    main()
