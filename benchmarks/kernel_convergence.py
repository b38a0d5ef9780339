"""The same 200 steps on real text with the plain path and with the kernels: the same curve, shown and counted.

A SmolLM2-135M-shaped model with a tokenizer trained on Python's standard library, bf16 with float32 masters. The plain
path is eager PyTorch for every operation. Two bf16 runs drift apart by rounding alone, so a third, plain with rows
summed in another order (two micro-batches instead of one), shows how far that goes by itself. The learning rate warms
up for a quarter of the run: with 20 steps up to 1e-3 gradients were so steep early on that rounding alone changed the
norm of one from 7.6 to 5.1, and a single step of two runs differed by 0.9.

    python -m benchmarks.kernel_convergence --results DIR
"""

import argparse
from pathlib import Path
from statistics import mean

import torch

from benchmarks.rows import RESULTS, append_row
from tightfit.jobs.job import Optimizer, Schedule
from tightfit.models.decoder import Decoder, Implementations
from tightfit.models.initialisation import init_weights
from tightfit.models.resolve import resolve_spec
from tightfit.models.text.tokenizer import train_tokenizer
from tightfit.report.curves import smoothed
from tightfit.train.data.dataset import PackedText
from tightfit.train.data.loader import make_loader
from tightfit.train.data.shards import prepare_text
from tightfit.train.data.sources import find_sources
from tightfit.train.data.texts import read_texts
from tightfit.train.optimizer.adamw import MasterAdamW
from tightfit.train.precision import LossScale
from tightfit.train.schedule import lr_ratio
from tightfit.train.step import train_step

PLAIN = Implementations(attention="eager", linear_cross_entropy="eager", norm="torch", rope="torch", glu="torch")
LEARNING_RATE = 5e-4
RUNS = {"plain": (PLAIN, 1), "kernels": (Implementations(), 1), "plain, other order": (PLAIN, 2)}


def losses(
    rows: PackedText, model_name: str, impl: Implementations, parts: int, steps: int, device: str
) -> list[float]:
    """The training loss of every step."""
    torch.manual_seed(0)
    model = Decoder(resolve_spec(model_name), impl)
    init_weights(model)
    settings = Optimizer(lr=LEARNING_RATE)
    optimizer = MasterAdamW(model.to(device), settings, torch.bfloat16 if device == "cuda" else None)
    batches, schedule, found = (
        iter(make_loader(rows, micro_batch=8 // parts, seed=0)),
        Schedule(warmup_steps=steps // 4),
        [],
    )
    for step in range(steps):
        micro = [next(batches) for _ in range(parts)]
        lr = settings.lr * lr_ratio(schedule, step, steps)
        found.append(train_step(model, optimizer, micro, torch.device(device), lr, LossScale()).loss)
    return found


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """The curves above, their distance from the plain one below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(2, 1), constrained_layout=True
    )
    for (name, values), color in zip(curves.items(), ("#1f5fa8", "#d1495b", "#888888"), strict=True):
        top.plot(smoothed(values), label=name, color=color, linewidth=1.2, linestyle="-" if name == "plain" else "--")
        if name != "plain":
            distance = [abs(a - b) for a, b in zip(values, curves["plain"], strict=True)]
            bottom.plot(smoothed(distance), label=f"{name} against plain", color=color, linewidth=1.2)
    top.set(ylabel="training loss (moving average)", title="the same 200 steps, plain and with the kernels")
    bottom.set(xlabel="step", ylabel="|difference|")
    for axes in (top, bottom):
        axes.legend(frameon=False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(folder: Path, commit: str | None, steps: int, length: int, model: str) -> None:
    """Train all three and append a row for each."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    vocab_size = resolve_spec(model).vocab_size
    tokenizer = train_tokenizer([piece.text for piece in read_texts(find_sources(["stdlib"]))], min(8192, vocab_size))
    store = prepare_text(["stdlib"], tokenizer, cache_dir=folder / "tokens", vocab_size=vocab_size)
    rows = PackedText(store, length)
    curves = {name: losses(rows, model, impl, parts, steps, device) for name, (impl, parts) in RUNS.items()}
    for name, values in curves.items():
        distance = [abs(a - b) for a, b in zip(values, curves["plain"], strict=True)]
        row = {
            "model": model,
            "steps": steps,
            "run": name,
            "final_loss": f"{mean(values[-10:]):.4f}",
            "mean_difference": f"{mean(distance):.5f}",
            "largest_difference": f"{max(distance):.5f}",
        }
        print(row)
        append_row("kernel_convergence", row, folder=folder, commit=commit)
    draw(curves, folder / "kernel_convergence.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--model", default="smollm2-135m")
    chosen = parser.parse_args()
    main(chosen.results, chosen.commit, chosen.steps, chosen.seq, chosen.model)
