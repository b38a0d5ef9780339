"""Memory over one training step with all logits at once and with the fused loss: the picture of what the loss costs.

Llama-3.1-8B's shape, one sequence of 32 768 tokens, every layer checkpointed, bf16 weights, gradients and Adam states.
The allocator notes when Python asks for memory, which is long before the GPU gets there: so that the time axis is the
GPU's, every launch waits for its kernel (CUDA_LAUNCH_BLOCKING). That costs a few per cent of the step time shown.

The picture's curves are the simulation's, on fake tensors, so that it can be drawn anywhere; the peaks that a GPU
measured are marked on them.

    python -m benchmarks.loss_memory --results DIR         (an 80 GB GPU or more; --model and --seq for smaller ones)
    python -m benchmarks.loss_memory --draw                (the picture alone: no GPU needed)
"""

import argparse
import csv
import gc
import os
from pathlib import Path

os.environ["CUDA_LAUNCH_BLOCKING"] = "1"

import torch

from benchmarks.recorded_step import recorded
from benchmarks.rows import RESULTS, append_row, picture_folder
from tightfit.jobs.job import Optimizer
from tightfit.jobs.levers import Levers
from tightfit.kernels.optimizer.clip_estimate import clip_factor
from tightfit.levers.checkpointing import checkpoint_layers
from tightfit.models.decoder import Decoder, Implementations
from tightfit.models.initialisation import init_weights
from tightfit.models.resolve import resolve_spec
from tightfit.models.spec import ModelSpec
from tightfit.plan.search.pins import parse_pins
from tightfit.report.simulated import simulate_timeline
from tightfit.report.timeline import Timeline, draw_timelines
from tightfit.train.optimizer.adamw import MasterAdamW, global_norm

SETTINGS = Optimizer(lr=1e-5)


def record_step(spec: ModelSpec, length: int, impl: Implementations) -> tuple[Timeline, float]:
    """The second of two steps, recorded; and its loss."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Decoder(spec, impl)
    torch.set_default_dtype(torch.float32)
    init_weights(model)
    checkpoint_layers(model, Levers(checkpoint_every=1))
    optimizer = MasterAdamW(model, SETTINGS)
    tokens = torch.randint(0, spec.vocab_size, (1, length + 1), device="cuda")
    for _ in range(2):
        with recorded() as recorder:
            recorder.mark("forward")
            hook = model.norm.register_forward_hook(lambda *_: recorder.mark("loss"))  # the last before the head
            output = model(tokens[:, :-1], tokens[:, 1:])
            assert output.loss is not None
            loss = output.loss / length
            hook.remove()
            recorder.mark("backward")
            loss.backward()
            recorder.mark("optimizer")
            optimizer.step(SETTINGS.lr, clip_factor(global_norm(optimizer.gradients), 1.0))
    return recorder.timeline, loss.item()


def main(model: str, length: int, folder: Path, commit: str | None) -> None:
    """Record both, append the rows, draw the picture."""
    spec = resolve_spec(model)
    for name, impl in (
        ("plain loss", Implementations(linear_cross_entropy="eager")),
        ("fused loss", Implementations()),
    ):
        timeline, loss = record_step(spec, length, impl)
        gc.collect()
        torch.cuda.empty_cache()
        milliseconds = timeline.positions[-1]
        row = {
            "model": model,
            "sequence_length": length,
            "loss": name,
            "peak_gib": f"{timeline.peak_bytes / 2**30:.2f}",
        }
        print(row, f"{milliseconds:.0f} ms, loss {loss:.4f}")
        append_row("loss_memory", {**row, "step_ms": f"{milliseconds:.0f}"}, folder=folder, commit=commit)
    draw(model, length, folder)


def draw(model: str, length: int, folder: Path) -> Path:
    """The picture: simulated curves, and the newest measured peaks of the same case."""
    spec, losses = resolve_spec(model), {"plain loss": "plain", "fused loss": "fused"}
    curves = {
        name: simulate_timeline(
            spec,
            parse_pins([f"levers.loss={loss}", "levers.checkpoint_every=1"]),
            sequence_length=length,
            precision="pure-bf16",
        )
        for name, loss in losses.items()
    }
    peaks, device = measured_peaks(model, length, folder)
    title = f"{model} shape, one step of {length:,} tokens, layers checkpointed\ncurves: simulated"
    title += f"; marks: peaks measured on one {device}" if device else ""
    picture = picture_folder(folder) / "loss_memory.png"
    draw_timelines(curves, title, picture, measured_peaks=peaks)
    return picture


def measured_peaks(model: str, length: int, folder: Path) -> tuple[dict[str, int], str]:
    """Bytes by loss and the device, of the newest rows of this case; nothing where none were measured."""
    try:
        with (folder / "loss_memory.csv").open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["model"] == model]
    except FileNotFoundError:
        return {}, ""
    rows = [row for row in rows if int(row["sequence_length"]) == length]
    peaks = {row["loss"]: round(float(row["peak_gib"]) * 2**30) for row in rows}
    return peaks, rows[-1]["device"] if rows else ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--seq", type=int, default=32_768)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    parser.add_argument("--draw", action="store_true", help="only draw")
    chosen = parser.parse_args()
    if chosen.draw:
        print(f"picture in {draw(chosen.model, chosen.seq, chosen.results)}")
    else:
        main(chosen.model, chosen.seq, chosen.results, chosen.commit)
