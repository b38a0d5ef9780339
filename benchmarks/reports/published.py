"""Predicted against published runs: tables by group and by run, and a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.published import RUNS, Run, group_errors, read_runs
from benchmarks.reports.truth import signed
from tightfit.jobs.engine import ENGINES
from tightfit.report.figure import panels, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = tuple[Sequence[str], Sequence[Sequence[str]]]
GIB = 2**30
COLORS = {
    "llm-foundry": "#1f5fa8",
    "nanotron": "#e0a458",
    "torchtitan": "#3a7d44",
    "torchtitan-eager": "#8fbf8f",
    "megatron": "#d1495b",
    "megatron-2022": "#8d5a97",
}


def group_rows(path: Path = RUNS) -> Rows:
    """Mean error and bias of speed and memory, of all runs and of every group."""
    runs = read_runs(path)
    memory = {each.group: each for each in group_errors(runs, Run.memory_error)}
    rows = []
    for speed in group_errors(runs, Run.speed_error):
        held = memory.get(speed.group)
        of_memory = (str(held.rows), f"{held.mean:.1%}", signed(held.bias)) if held else ("", "", "")
        rows.append((speed.group, str(speed.rows), f"{speed.mean:.1%}", signed(speed.bias), *of_memory))
    return ("runs", "speed", "mean error", "bias", "memory", "mean error", "bias"), rows


def engine_rows() -> Rows:
    """Every engine in a few words."""
    rows = []
    for engine in ENGINES.values():
        attention = "cuDNN, else FlashAttention-2" if engine.attention == "cudnn" else engine.attention
        passes = engine.eager_norm_passes or engine.passes
        forward, backward = passes.stream
        memory = engine.memory
        kept = f"{memory.norm_copies:g} H, {memory.rope_copies:g} (Q + K), {memory.gate_copies:g} F"
        row = (f"`{engine.name}`", engine.is_for, attention, f"{forward:g} + {backward:g}", kept)
        rows.append((*row, f"{memory.slack_share:.0%}"))
    return ("engine", "for", "attention", "norm passes", "kept beyond ours", "reserved beyond allocated"), rows


def draw_published(path: Path, source: Path = RUNS) -> None:
    """Tokens per second and GPU, and memory, predicted against published, coloured by engine."""
    runs = read_runs(source)
    with panels(path, 1, 2, width=10, height=4.8) as (figure, axes):
        speeds = [(run, run.tokens_s_gpu, run.tokens_s_gpu * (1 + run.speed_error())) for run in runs]
        _draw(axes[0][0], speeds, "tokens per second and GPU")
        weighed = [(run, run.memory_gib) for run in runs if run.memory_gib]
        sizes = [(run, size, size * (1 + (run.memory_error() or 0))) for run, size in weighed]
        _draw(axes[0][1], sizes, "memory of the fullest GPU, GiB")
        figure.suptitle("Runs that others published, predicted for their engine (hollow: held out)")


def _draw(axes: "Axes", points: Sequence[tuple[Run, float, float]], title: str) -> None:
    shown: set[str] = set()
    for run, published, predicted in points:
        color = COLORS.get(run.engine, "#555555")
        face = color if run.is_fitted else "none"
        label = None if run.engine in shown else run.engine
        shown.add(run.engine)
        axes.scatter([published], [predicted], s=22, facecolors=face, edgecolors=color, linewidths=0.9, label=label)
    values = [value for _, *pair in points for value in pair]
    ends = 0.8 * min(values), 1.25 * max(values)
    axes.plot(ends, ends, color="#555555", linewidth=0.8, label="exactly as published")
    for share in (0.8, 1.2):
        label = "20 % more or less" if share > 1 else None
        axes.plot(ends, [share * end for end in ends], color="#777777", linewidth=0.8, linestyle=":", label=label)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, title=title, xlabel="published", ylabel="predicted")
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    plain(axes)
