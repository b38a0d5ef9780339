"""Pictures of memory: stacked bars of parameters, gradients, optimizer states and activations against a card's memory.

A bar is the peak of a training step (formulas/training.py), allocated bytes. Steps have several micro-batches, so that
gradients are held throughout. Optimizer states include the master weights; activations include logits and everything
else that is not a state. The `classic` layer counts what the original GPT layer saves for backward (formulas/gpt.py),
attention scores included, instead of what our layer saves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tightfit.errors import UserError
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas import gpt
from tightfit.memory.formulas.overheads import Overheads
from tightfit.memory.formulas.training import training_ledger
from tightfit.memory.ledger import Component, Ledger
from tightfit.models.spec import ModelSpec
from tightfit.report.figure import CARD_COLOR, GIB, panels, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LayerFormula = Literal["ours", "classic"]
MICRO_BATCHES = 2
LENGTHS = (1024, 2048, 4096, 8192, 16384)
GROUPS: dict[str, tuple[Component, ...]] = {
    "parameters": ("weights",),
    "gradients": ("gradients",),
    "optimizer states": ("master weights", "optimizer states"),
    "activations": ("activations", "logits and loss", "inputs", "communication", "workspace"),
}
COLORS = {"parameters": "#1f5fa8", "gradients": "#4c9f70", "optimizer states": "#9db8d9", "activations": "#e0a458"}
ZERO_NAMES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
LABEL_SHARE = 0.05
"""Height of a bar's label as a share of the axis."""


@dataclass(frozen=True)
class Card:
    """A card's memory: a line across the bars."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Bar:
    """One bar: components stacked on one another."""

    label: str
    parts: dict[str, int]

    @property
    def bytes(self) -> int:
        """The bar's height."""
        return sum(self.parts.values())


def bar(
    spec: ModelSpec, length: int, levers: Levers, *, data: int = 1, zero: int = 0, layer: LayerFormula = "ours"
) -> Bar:
    """The peak of a step with micro-batches of one row, on one of `data` GPUs."""
    layout = Layout.model_validate({"micro_batch": 1, "data": data, "zero": zero})
    workload = Workload(spec=spec, sequence_length=length, global_batch=MICRO_BATCHES * data)
    parts = grouped(training_ledger(workload, layout, levers, Overheads(0, 0, 0)))
    if layer == "classic":
        layers = gpt.model_bytes(1, length, spec.hidden_size, spec.heads, spec.layers)
        parts["activations"] = layers
    return Bar(f"{length // 1024} K" if length % 1024 == 0 else str(length), parts)


def grouped(ledger: Ledger) -> dict[str, int]:
    """Bytes of the four groups at the peak."""
    found = ledger.by_component(*ledger.fullest())
    return {name: sum(found.get(component, 0) for component in components) for name, components in GROUPS.items()}


def draw_memory(
    models: dict[str, ModelSpec],
    lengths: Sequence[int],
    cards: Sequence[Card],
    path: Path,
    *,
    levers: Levers | None = None,
    layer: LayerFormula = "ours",
) -> dict[str, list[Bar]]:
    """A panel per model, a bar per sequence length; returns what was drawn."""
    if not models:
        raise UserError("no model to draw; give at least one --model")
    bars_by_panel = {
        name: [bar(spec, length, levers or Levers(), layer=layer) for length in lengths]
        for name, spec in models.items()
    }
    title = f"One GPU, micro-batches of one row, bf16 with float32 masters: {_layer_text(levers or Levers(), layer)}"
    _draw(bars_by_panel, cards, title, path, share_scale=False)
    return bars_by_panel


def draw_zero(
    name: str,
    spec: ModelSpec,
    ranks: int,
    lengths: Sequence[int],
    cards: Sequence[Card],
    path: Path,
    *,
    levers: Levers | None = None,
) -> dict[str, list[Bar]]:
    """A panel per ZeRO stage; returns what was drawn."""
    if ranks < 2:
        raise UserError(f"--gpus is {ranks}, which leaves nobody to split with; give 2 or more")
    used = levers or Levers()
    bars_by_panel = {
        stage: [bar(spec, length, used, data=ranks, zero=zero) for length in lengths]
        for zero, stage in enumerate(ZERO_NAMES)
    }
    title = f"{name} on {ranks} GPUs, micro-batches of one row on each: {_layer_text(used, 'ours')}"
    _draw(bars_by_panel, cards, title, path, share_scale=True)
    return bars_by_panel


def _layer_text(levers: Levers, layer: LayerFormula) -> str:
    if layer == "classic":
        return "the classic GPT layer with its scores"
    if not levers.checkpoint_every:
        return "no recomputation"
    which = "every layer" if levers.checkpoint_every == 1 else f"one layer in {levers.checkpoint_every}"
    return f"{which} recomputed"


def _draw(
    bars_by_panel: dict[str, list[Bar]], cards: Sequence[Card], title: str, path: Path, *, share_scale: bool
) -> None:
    lines = [card.bytes for card in cards]
    highest = max(one.bytes for bars in bars_by_panel.values() for one in bars)
    with panels(path, 1, len(bars_by_panel), width=3.2 * len(bars_by_panel) + 1.2, height=4.4, sharey=share_scale) as (
        figure,
        axes,
    ):
        for panel, (name, bars) in zip(axes[0], bars_by_panel.items(), strict=True):
            tallest = highest if share_scale else max(one.bytes for one in bars)
            top = 1.1 * max(tallest, *lines, 1) / GIB
            _draw_bars(panel, name, bars, cards, top)
            panel.set_ylim(0, top)
        axes[0][0].set_ylabel("GiB on a GPU at the fullest moment")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        figure.suptitle(title)


def _draw_bars(axes: "Axes", name: str, bars: list[Bar], cards: Sequence[Card], highest: float) -> None:
    """Draw one panel; `highest` (GiB) is the end of its axis."""
    labels, bottoms = [one.label for one in bars], [0.0] * len(bars)
    for group, color in COLORS.items():
        heights = [one.parts[group] / GIB for one in bars]
        axes.bar(labels, heights, bottom=bottoms, color=color, label=group, width=0.72)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for index, height in enumerate(bottoms):
        label = axes.annotate(
            f"{height:,.0f}",
            (index, _clear_of(height, [card.bytes / GIB for card in cards], highest)),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=8,
            zorder=4,
        )
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.4})  # a card's line passes behind it
    for card in cards:
        axes.axhline(card.bytes / GIB, color=CARD_COLOR, linewidth=1.2, linestyle="--", label=card.name)
    axes.set(title=name, xlabel="sequence length")
    plain(axes)


def _clear_of(height: float, lines: Sequence[float], highest: float) -> float:
    """Height of a bar's label: on top of the bar, or on a card's line that would otherwise cross the label."""
    room = LABEL_SHARE * highest
    return max([height, *(line for line in lines if height <= line < height + room)])
