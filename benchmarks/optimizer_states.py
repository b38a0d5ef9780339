"""What narrower optimizer states cost: the same steps on real text in every format, their curves and bytes a parameter.

Ten layers of SmolLM2-135M's shape on a GPU (bf16 with float32 masters; with all thirty a step is launches of small
kernels and little else), nano-llama in float32 on a CPU, with a tokenizer trained on the text, Python's
standard library. The last two runs have bf16 weights and no masters, rounded to nearest and stochastically; these are
left out on CPUs, most of which have no instructions for bf16. Bytes are those of masters and moments, counted from the
tensors. Documents follow each other in a row without a border: attention is then the plain causal one.

    python benchmarks/optimizer_states.py --results DIR
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from results import RESULTS, append_row

from tightfit.jobs.job import Optimizer, PrecisionName, Schedule
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.models.initialisation import init_weights
from tightfit.models.resolve import resolve_spec
from tightfit.models.spec import ModelSpec
from tightfit.models.tokenizer import train_tokenizer
from tightfit.report.curves import smoothed
from tightfit.train.assembly import assemble, unfilled
from tightfit.train.data.dataset import PackedText
from tightfit.train.data.loader import make_loader
from tightfit.train.data.shards import prepare_text
from tightfit.train.data.sources import find_sources
from tightfit.train.data.texts import read_texts
from tightfit.train.optimizer import MasterAdamW
from tightfit.train.precision import LossScale
from tightfit.train.schedule import lr_ratio
from tightfit.train.step import train_step

SETTINGS = Optimizer(lr=5e-4)
COLORS = ("#1f5fa8", "#d1495b", "#2a9d5c", "#8a5bc7", "#e0912f", "#888888", "#111111")
MOST_LAYERS = 10
LAST = 20
"""Steps whose mean loss is called final."""


@dataclass(frozen=True)
class Variant:
    """One way of holding weights and states."""

    levers: Levers
    pure: bool = False
    """bf16 weights without masters."""

    def precision(self, device: torch.device) -> PrecisionName:
        """What it trains in there."""
        if device.type == "cpu":
            return "fp32"
        return "pure-bf16" if self.pure else "bf16"


VARIANTS = {
    "fp32": Variant(Levers()),
    "bf16": Variant(Levers(optimizer_states="bf16")),
    "8bit": Variant(Levers(optimizer_states="8bit")),
    "factored": Variant(Levers(optimizer_states="factored")),
    "fp32, updates in backward": Variant(Levers(update_in_backward=True)),
    "bf16 weights, fp32": Variant(Levers(optimizer_states="fp32"), pure=True),
    "bf16 weights, fp32, stochastic": Variant(Levers(optimizer_states="fp32", rounding="stochastic"), pure=True),
}


@dataclass(frozen=True)
class Curve:
    """What a run gave."""

    losses: list[float]
    state_bytes: float
    """Masters and moments of one parameter."""
    step_ms: float


def shallow(model: str) -> ModelSpec:
    """A shape with at most so many layers that kernels, not their launches, take a step's time."""
    spec = resolve_spec(model)
    return replace(spec, layers=min(spec.layers, MOST_LAYERS))


def text_rows(folder: Path, spec: ModelSpec, length: int) -> PackedText:
    """Rows of `length` tokens, one document after another."""
    texts = [piece.text for piece in read_texts(find_sources(["stdlib"]))]
    tokenizer = train_tokenizer(texts, min(8192, spec.vocab_size))
    store = prepare_text(["stdlib"], tokenizer, cache_dir=folder / "tokens", vocab_size=spec.vocab_size)
    return PackedText(store, length, separate_documents=False)


def train(rows: PackedText, spec: ModelSpec, variant: Variant, steps: int, device: torch.device) -> Curve:
    """The same batches in the same order, whatever the variant."""
    torch.manual_seed(0)
    precision = variant.precision(device)
    model = unfilled(spec, Layout(), precision, device)
    module, optimizer = assemble(model, None, Layout(), variant.levers, precision, SETTINGS, device, init_weights)
    batches, schedule = iter(make_loader(rows, micro_batch=8, seed=0)), Schedule(warmup_steps=steps // 4)
    losses, milliseconds = [], []
    for step in range(steps):
        began, lr = time.perf_counter(), SETTINGS.lr * lr_ratio(schedule, step, steps)
        losses.append(train_step(module, optimizer, [next(batches)], device, lr, LossScale()).loss)
        milliseconds.append(1e3 * (time.perf_counter() - began))
    return Curve(losses, state_bytes(optimizer) / spec.params(), median(milliseconds[steps // 2 :]))


def state_bytes(optimizer: MasterAdamW) -> int:
    """Of all state tensors but the step counts."""
    return sum(tensor.nbytes for name, tensor in optimizer.state().items() if not name.startswith("step/"))


def draw(curves: dict[str, Curve], path: Path, title: str) -> None:
    """The curves above, their distance from that with float32 states below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(8, 7), sharex=True, height_ratios=(2, 1), constrained_layout=True
    )
    plain = curves["fp32"].losses
    for (name, curve), color in zip(curves.items(), COLORS, strict=False):
        label = f"{name}: {curve.state_bytes:.2f} B a parameter"
        top.plot(smoothed(curve.losses), label=label, color=color, linewidth=1.2)
        distance = [a - b for a, b in zip(curve.losses, plain, strict=True)]
        bottom.plot(smoothed(distance), color=color, linewidth=1.2)
    top.set(ylabel="training loss (moving average)", title=title)
    bottom.set(xlabel="step", ylabel="loss − fp32's")
    top.legend(frameon=False)
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def report(name: str, curve: Curve, plain: Curve, common: dict[str, Any]) -> dict[str, Any]:
    """A row of the results."""
    final = mean(curve.losses[-LAST:])
    return common | {
        "states": name,
        "state_bytes_per_parameter": f"{curve.state_bytes:.4f}",
        "final_loss": f"{final:.4f}",
        "above_fp32": f"{final - mean(plain.losses[-LAST:]):.4f}",
        "step_ms_p50": f"{curve.step_ms:.1f}",
    }


def main(folder: Path, commit: str | None, steps: int, length: int, model: str | None, names: Sequence[str]) -> None:
    """Train all of them and append a row for each."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model or ("smollm2-135m" if device.type == "cuda" else "nano-llama")
    spec = shallow(model)
    rows = text_rows(folder, spec, length)
    print(f"{device}: {model}, {spec.layers} layers, {steps} steps of 8 × {length} each", flush=True)
    chosen = {name: variant for name, variant in VARIANTS.items() if not names or name in {"fp32", *names}}
    if device.type == "cpu":
        chosen = {name: variant for name, variant in chosen.items() if not variant.pure}
    common = {"model": model, "layers": spec.layers, "steps": steps, "sequence_length": length, "batch": 8}
    curves: dict[str, Curve] = {}
    for name, variant in chosen.items():
        curves[name] = train(rows, spec, variant, steps, device)
        row = report(name, curves[name], curves["fp32"], common)
        print(row, flush=True)
        append_row("optimizer_states", row, folder=folder, commit=commit)
    draw(curves, folder / "optimizer_states.png", f"{model}: the same {steps} steps, states in other formats")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--model")
    parser.add_argument("--states", nargs="*", default=[], help="variants to run beside fp32; all of them by default")
    given = parser.parse_args()
    main(given.results, given.commit, given.steps, given.seq, given.model, given.states)
