"""Curves: the same steps on real text in several ways, their losses beside each other, as rows and as a picture.

Ten layers of SmolLM2-135M's shape on a GPU (bf16 with float32 masters; with all thirty a step is launches of small
kernels and little else), nano-llama in float32 on a CPU, with a tokenizer trained on the text, Python's standard
library. Documents follow each other in a row without a border: attention is then the plain causal one. Weights and
batches are the same in every run. Bytes are those of masters and moments, counted from the tensors. optimizer_states.py
and fp8_convergence.py say which ways there are.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from benchmarks.peers.updaters import use_peer
from benchmarks.rows import RESULTS, append_row, picture_folder
from tightfit.jobs.job import Optimizer, PrecisionName, Schedule
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.models.initialisation import init_weights
from tightfit.models.resolve import resolve_spec
from tightfit.models.spec import ModelSpec
from tightfit.models.text.tokenizer import train_tokenizer
from tightfit.report.curves import smoothed
from tightfit.report.figure import panels
from tightfit.train.assembly import assemble, unfilled
from tightfit.train.data.dataset import PackedText
from tightfit.train.data.loader import make_loader
from tightfit.train.data.shards import prepare_text
from tightfit.train.data.sources import find_sources
from tightfit.train.data.texts import read_texts
from tightfit.train.optimizer.adamw import NO_LEVERS, MasterAdamW
from tightfit.train.precision import LossScale
from tightfit.train.schedule import lr_ratio
from tightfit.train.step import train_step

SETTINGS = Optimizer(lr=5e-4)
BATCH = 8
MOST_LAYERS = 10
LAST = 20
"""Steps whose mean loss is called final."""
COLORS = ("#1f5fa8", "#d1495b", "#2a9d5c", "#8a5bc7", "#e0912f", "#17a2b8", "#a86b32", "#888888", "#111111")


@dataclass(frozen=True)
class Variant:
    """One way of training."""

    levers: Levers = NO_LEVERS
    pure: bool = False
    """bf16 weights without masters."""
    peer: str = ""
    """Whose optimizer updates the masters, if not ours."""

    def precision(self, device: torch.device) -> PrecisionName:
        """What it trains in there."""
        if device.type == "cpu":
            return "fp32"
        return "pure-bf16" if self.pure else "bf16"


@dataclass(frozen=True)
class Curve:
    """What a run gave."""

    losses: list[float]
    state_bytes: float
    """Masters and moments of one parameter."""
    step_ms: float
    update_ms: float
    """The optimizer's part of a step."""

    def above(self, other: "Curve") -> list[float]:
        """How much higher the loss was, step by step."""
        return [a - b for a, b in zip(self.losses, other.losses, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Study:
    """Variants to lay beside the first of them, and how the results are called."""

    name: str
    column: str
    title: str
    variants: Mapping[str, Variant]
    shows_bytes: bool = False


class _Watch:
    """Milliseconds of steps and of their updates."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.steps, self.updates = device, list[float](), list[float]()
        self.began = self.update_began = 0.0

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def begin(self) -> None:
        """A step."""
        self.began = self.update_began = self._now()

    def on_phase(self, phase: str) -> None:
        """The update begins when backward has ended."""
        if phase == "optimizer":
            self.update_began = self._now()

    def end(self) -> None:
        """Of the step."""
        now = self._now()
        self.steps.append(1e3 * (now - self.began))
        self.updates.append(1e3 * (now - self.update_began))

    def medians(self) -> tuple[float, float]:
        """Of the second half."""
        return median(self.steps[len(self.steps) // 2 :]), median(self.updates[len(self.updates) // 2 :])


def shallow(model: str) -> ModelSpec:
    """A shape with at most so many layers that kernels, not their launches, take a step's time."""
    spec = resolve_spec(model)
    return replace(spec, layers=min(spec.layers, MOST_LAYERS))


@cache
def text_rows(spec: ModelSpec, length: int) -> PackedText:
    """Rows of `length` tokens, one document after another."""
    texts = [piece.text for piece in read_texts(find_sources(["stdlib"]))]
    tokenizer = train_tokenizer(texts, min(8192, spec.vocab_size))
    folder = Path(tempfile.mkdtemp(prefix="tightfit-tokens-"))
    store = prepare_text(["stdlib"], tokenizer, cache_dir=folder, vocab_size=spec.vocab_size)
    return PackedText(store, length, separate_documents=False)


def train(rows: PackedText, spec: ModelSpec, variant: Variant, steps: int, device: torch.device) -> Curve:
    """The same batches in the same order, whatever the variant."""
    torch.manual_seed(0)
    precision = variant.precision(device)
    model = unfilled(spec, Layout(), precision, device)
    module, optimizer = assemble(model, None, Layout(), variant.levers, precision, SETTINGS, device, init_weights)
    if variant.peer:
        use_peer(optimizer, variant.peer)
    batches, schedule = iter(make_loader(rows, micro_batch=BATCH, seed=0)), Schedule(warmup_steps=steps // 4)
    losses, watch = [], _Watch(device)
    for step in range(steps):
        batch, lr = next(batches), SETTINGS.lr * lr_ratio(schedule, step, steps)
        watch.begin()
        losses.append(train_step(module, optimizer, [batch], device, lr, LossScale(), watch.on_phase).loss)
        watch.end()
    return Curve(losses, state_bytes(optimizer) / spec.params(), *watch.medians())


def state_bytes(optimizer: MasterAdamW) -> int:
    """Of all state tensors but the step counts."""
    return sum(tensor.nbytes for name, tensor in optimizer.state().items() if not name.startswith("step/"))


def draw(study: Study, curves: Mapping[str, Curve], path: Path, title: str) -> None:
    """The curves above, their distance from the first one below."""
    first, *_ = curves
    with panels(path, 2, 1, width=8, height=7.5, sharex=True) as (_, grid):
        top, bottom = grid[0][0], grid[1][0]
        for (name, curve), color in zip(curves.items(), COLORS, strict=False):
            label = f"{name}: {curve.state_bytes:.2f} B a parameter" if study.shows_bytes else name
            top.plot(smoothed(curve.losses), label=label, color=color, linewidth=1.2)
            bottom.plot(smoothed(curve.above(curves[first])), color=color, linewidth=1.2)
        top.set(ylabel="training loss (moving average)", title=title)
        bottom.set(xlabel="step", ylabel=f"loss − that of {first}")
        top.legend(frameon=False)
        for axes in (top, bottom):
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)


def row_of(study: Study, name: str, curve: Curve, first: Curve) -> dict[str, Any]:
    """What a run's row says of it."""
    apart = curve.above(first)
    return {
        study.column: name,
        "state_bytes_per_parameter": f"{curve.state_bytes:.4f}",
        "final_loss": f"{mean(curve.losses[-LAST:]):.4f}",
        "above_first": f"{mean(apart[-LAST:]):.4f}",
        "mean_difference": f"{mean(map(abs, apart)):.4f}",
        "largest_difference": f"{max(map(abs, apart)):.4f}",
        "step_ms_p50": f"{curve.step_ms:.1f}",
        "update_ms_p50": f"{curve.update_ms:.2f}",
    }


def run_study(study: Study, arguments: Sequence[str] | None = None) -> None:
    """Train all of its variants, append a row for each, and draw them."""
    chosen = parsed(study, arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = chosen.model or ("smollm2-135m" if device.type == "cuda" else "nano-llama")
    spec = shallow(model)
    rows = text_rows(spec, chosen.seq)
    common = {
        "model": model,
        "layers": spec.layers,
        "steps": chosen.steps,
        "sequence_length": chosen.seq,
        "batch": BATCH,
    }
    first, curves = next(iter(study.variants)), dict[str, Curve]()
    for name, variant in study.variants.items():
        if (chosen.only and name not in (first, *chosen.only)) or (device.type == "cpu" and variant.pure):
            continue
        curves[name] = train(rows, spec, variant, chosen.steps, device)
        row = common | row_of(study, name, curves[name], curves[first])
        print(row, flush=True)
        append_row(study.name, row, folder=chosen.results, commit=chosen.commit)
    picture = picture_folder(chosen.results) / f"{study.name}.png"
    draw(study, curves, picture, f"{model}: the same {chosen.steps} steps, {study.title}")


def parsed(study: Study, arguments: Sequence[str] | None) -> argparse.Namespace:
    """What is asked for on the command line."""
    parser = argparse.ArgumentParser(description=f"{study.name}: the same steps, {study.title}")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--model")
    parser.add_argument("--only", nargs="*", default=[], help="these beside the first; all of them by default")
    return parser.parse_args(arguments)
