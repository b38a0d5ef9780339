"""What each lever saves and costs: peak memory beside step time, from the ladder rows of benchmarks/levers.py.

Each row has what was predicted just before its step; the picture marks it on the bar.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tightfit.errors import UserError
from tightfit.report.figure import panels, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LADDER = "1b-ladder"
TITLES = {LADDER: "What each lever saves and costs: Llama-3.2-1B, one row of 16,384 tokens, one H200"}
NONE = "no lever"
NAMES = {
    "checkpoint_every=1": "checkpoint every layer",
    "checkpoint_keep=attention": "keep attention",
    "checkpoint_keep=matmuls": "keep matmuls",
    "offload_checkpoints=True": "checkpoints on the host",
    "update_in_backward=True": "update in backward",
    "offload=optimizer": "optimizer on the host",
    "offload=weights": "weights and optimizer on the host",
}
SHORT = {
    "weights and optimizer on the host": "all on host",
    "checkpoint every layer": "checkpoints",
    "checkpoints on the host": "on host",
    "optimizer on the host": "optimizer on host",
    "optimizer states": "states",
    "update in backward": "early update",
}
"""Words of a name that a picture has no room for."""
GPU, HOST, TIME, SAID = "#1f5fa8", "#6f9bc8", "#d1495b", "#111111"


class Rung(NamedTuple):
    """One lever's row."""

    name: str
    gpu_gib: float
    host_gib: float
    step_s: float
    predicted_gib: float
    predicted_s: float


def rungs(path: Path, case: str = LADDER) -> list[Rung]:
    """The newest row of every lever of `case` that ran, in the order they first came."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row.get("case") == case and row.get("step_s")]
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}); run benchmarks/levers.py --ladder first") from None
    latest = {row["levers"]: row for row in rows}
    if not latest:
        raise UserError(f"{path} has no rows of {case}; run benchmarks/levers.py --ladder first")
    order = list(dict.fromkeys(row["levers"] for row in rows))
    return [_rung(latest[levers]) for levers in order]


def _rung(row: dict[str, str]) -> Rung:
    columns = ("peak_allocated_gib", "host_gib", "step_s", "predicted_gib", "predicted_s")
    return Rung(named(row["levers"]), *(float(row[column]) for column in columns))


def named(levers: str) -> str:
    """A set of levers in words."""
    return ", ".join(NAMES.get(each, each.replace("_", " ").replace("=", " ")) for each in levers.split()) or NONE


def short(name: str) -> str:
    """The same in few words."""
    for long, few in SHORT.items():
        name = name.replace(long, few)
    return name


def draw_levers(path: Path, out: Path, case: str = LADDER) -> None:
    """Three panels of bars: memory on the GPU, memory on the host, and time of a step against that without levers."""
    from matplotlib.ticker import MaxNLocator

    found = rungs(path, case)
    with panels(out, 1, 3, width=11, height=1.9 + 0.3 * len(found), sharey=True) as (figure, axes_grid):
        gpu, host, time = axes_grid[0]
        _bars(gpu, [rung.gpu_gib for rung in found], GPU, "GPU: GiB at the peak")
        _mark(gpu, [rung.predicted_gib for rung in found])
        _bars(host, [rung.host_gib for rung in found], HOST, "host: GiB, pinned")
        host.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        steps = [rung.step_s for rung in found]
        _bars(time, steps, TIME, "seconds a step, × no lever")
        _mark(time, [rung.predicted_s for rung in found])
        for place, rung in enumerate(found):
            _label(gpu, place, max(rung.gpu_gib, rung.predicted_gib), f"{rung.gpu_gib:.1f}")
            if rung.host_gib:
                _label(host, place, rung.host_gib, f"{rung.host_gib:.1f}")
            right = max(rung.step_s, rung.predicted_s)
            _label(time, place, right, f"{rung.step_s / _plain_s(found):.2f} ×")
        gpu.set_yticks(range(len(found)), [short(rung.name) for rung in found])
        gpu.invert_yaxis()
        handles, labels = time.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", frameon=False, fontsize=8)
        figure.suptitle(TITLES.get(case, case))


def _label(axes: "Axes", place: int, right: float, text: str) -> None:
    """Behind the bar and behind what was predicted of it."""
    axes.text(right, place, f"  {text}", va="center", fontsize=8)


def _bars(axes: "Axes", values: list[float], color: str, title: str) -> None:
    axes.barh(range(len(values)), values, color=color)
    axes.set_title(title, fontsize=9)
    axes.margins(x=0.22)
    plain(axes)


def _mark(axes: "Axes", values: list[float]) -> None:
    """What was predicted, on each bar."""
    places = range(len(values))
    low, high = ([place + shift for place in places] for shift in (-0.4, 0.4))
    axes.vlines(values, low, high, color=SAID, linewidth=1.6, label="black line: predicted before the step ran")


def _plain_s(found: list[Rung]) -> float:
    return next((rung.step_s for rung in found if rung.name == NONE), found[0].step_s)


def lever_rows(path: Path, case: str = LADDER) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """The same as a table."""
    found = rungs(path, case)
    header = ("lever", "GPU", "host", "step", "against none", "predicted")
    return header, [
        (
            rung.name,
            f"{rung.gpu_gib:.1f} GiB",
            f"{rung.host_gib:.1f} GiB" if rung.host_gib else "–",
            f"{rung.step_s:.3f} s",
            f"{rung.step_s / _plain_s(found):.2f} ×",
            f"{rung.predicted_gib:.1f} GiB, {rung.predicted_s:.3f} s",
        )
        for rung in found
    ]


LEVERS = (
    "",
    "checkpoint_every=1",
    "checkpoint_every=1 checkpoint_keep=attention",
    "checkpoint_every=1 checkpoint_keep=matmuls",
    "checkpoint_every=1 offload_checkpoints=true",
    "tiles=8",
    "update_in_backward=true",
    "optimizer_states=bf16",
    "optimizer_states=8bit",
    "optimizer_states=factored",
    "offload=optimizer",
    "offload=optimizer update_in_backward=true",
    "offload=weights update_in_backward=true checkpoint_every=1",
    "matmul=fp8-tensor",
)
QUESTION = ("llama-3.1-8b", 8192, "H200")


def predicted_rows() -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """What formulas and costs say of every lever alone, for one row of QUESTION."""
    from tightfit.hardware.machine import parse_machine
    from tightfit.jobs.layout import Layout
    from tightfit.jobs.levers import Levers
    from tightfit.jobs.workload import Workload
    from tightfit.memory.formulas.training import peaks
    from tightfit.models.presets import preset
    from tightfit.plan.cost import Costs
    from tightfit.plan.search.pins import parse_pins

    model, length, machine = QUESTION
    workload, layout = Workload(spec=preset(model), sequence_length=length, global_batch=1), Layout(micro_batch=1)
    frame, rows = Costs(workload, parse_machine(machine)).layout_cost(layout), []
    plain_s = frame.step(Levers()).step_s
    for text in LEVERS:
        levers = Levers(**parse_pins([f"levers.{each}" for each in text.split()]).levers)
        needed = peaks(workload, layout, levers)
        gpu, host = needed.gpu_bytes / 2**30, needed.host_bytes / 2**30
        shown = ", ".join(f"`{each}`" for each in text.split()) or NONE
        on_host = f"{host:.1f} GiB" if host else "–"
        rows.append((shown, f"{gpu:.1f} GiB", on_host, f"{frame.step(levers).step_s / plain_s:.2f} ×"))
    return ("levers", "GPU", "host", "time of a step"), rows


def measured_block(path: Path) -> str:
    """The measured ladder as a table, or where it would come from."""
    try:
        header, rows = lever_rows(path)
    except UserError:
        return "`python -m benchmarks.levers --ladder` measures them."
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
