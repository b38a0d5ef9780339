"""What each lever saves and costs: peak memory beside step time, from the ladder rows of benchmarks/levers.py."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tightfit.errors import UserError
from tightfit.report.figure import panels, plain

LADDER = "1b-ladder"
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
GPU, HOST, TIME = "#1f5fa8", "#a8c4e0", "#d1495b"


class Rung(NamedTuple):
    """One lever's row."""

    name: str
    gpu_gib: float
    host_gib: float
    step_s: float


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
    return Rung(
        named(row["levers"]), float(row["peak_allocated_gib"]), float(row["host_gib"]), float(row["step_s"])
    )  # fmt: skip


def named(levers: str) -> str:
    """A set of levers in words."""
    return ", ".join(NAMES.get(each, each.replace("_", " ").replace("=", " ")) for each in levers.split()) or NONE


def draw_levers(path: Path, out: Path, case: str = LADDER) -> None:
    """Two panels of bars: GPU and host memory, and time of a step against that without levers."""
    found = rungs(path, case)
    plain_s = next((rung.step_s for rung in found if rung.name == NONE), found[0].step_s)
    with panels(out, 1, 2, width=11, height=1.2 + 0.32 * len(found)) as (_, axes_grid):
        memory, time = axes_grid[0]
        places = range(len(found))
        memory.barh(places, [rung.gpu_gib for rung in found], color=GPU, label="GPU, peak allocated")
        starts = [rung.gpu_gib for rung in found]
        memory.barh(places, [rung.host_gib for rung in found], left=starts, color=HOST, label="host, pinned")
        memory.set_yticks(list(places), [rung.name for rung in found])
        memory.set_xlabel("GiB")
        memory.legend(frameon=False, loc="lower right")
        time.barh(places, [rung.step_s for rung in found], color=TIME)
        for place, rung in zip(places, found, strict=True):
            time.text(rung.step_s, place, f" {rung.step_s / plain_s:.2f} ×", va="center", fontsize=8)
        time.set_yticks(list(places), [""] * len(found))
        time.set_xlabel("seconds a step")
        for axes in (memory, time):
            axes.invert_yaxis()
            plain(axes)


def lever_rows(path: Path, case: str = LADDER) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """The same as a table."""
    found = rungs(path, case)
    plain_s = next((rung.step_s for rung in found if rung.name == NONE), found[0].step_s)
    header = ("lever", "GPU", "host", "step", "against none")
    return header, [
        (rung.name, f"{rung.gpu_gib:.1f} GiB", f"{rung.host_gib:.1f} GiB" if rung.host_gib else "–",
         f"{rung.step_s:.3f} s", f"{rung.step_s / plain_s:.2f} ×")
        for rung in found
    ]  # fmt: skip


PREDICTED = (
    "", "checkpoint_every=1", "checkpoint_every=1 checkpoint_keep=attention",
    "checkpoint_every=1 checkpoint_keep=matmuls", "checkpoint_every=1 offload_checkpoints=true", "tiles=8",
    "update_in_backward=true", "optimizer_states=bf16", "optimizer_states=8bit", "optimizer_states=factored",
    "offload=optimizer", "offload=optimizer update_in_backward=true",
    "offload=weights update_in_backward=true checkpoint_every=1", "matmul=fp8-tensor",
)  # fmt: skip
QUESTION = ("llama-3.1-8b", 8192, "H200")


def predicted_rows() -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """What formulas and costs say of every lever alone, for one row of QUESTION."""
    from tightfit.hardware.machine import parse_machine
    from tightfit.jobs.layout import Layout
    from tightfit.jobs.levers import Levers
    from tightfit.jobs.workload import Workload
    from tightfit.memory.formulas.training import peak
    from tightfit.models.presets import preset
    from tightfit.plan.cost import Costs
    from tightfit.plan.pins import parse_pins

    model, length, machine = QUESTION
    workload, layout = Workload(spec=preset(model), sequence_length=length, global_batch=1), Layout(micro_batch=1)
    frame, rows = Costs(workload, parse_machine(machine)).frame(layout), []
    plain_s = frame.step(Levers()).step_s
    for text in PREDICTED:
        levers = Levers(**parse_pins([f"levers.{each}" for each in text.split()]).levers)
        gpu, host = (count / 2**30 for count in peak(workload, layout, levers))
        shown = ", ".join(f"`{each}`" for each in text.split()) or NONE
        on_host = f"{host:.1f} GiB" if host else "–"
        rows.append((shown, f"{gpu:.1f} GiB", on_host, f"{frame.step(levers).step_s / plain_s:.2f} ×"))
    return ("levers", "GPU", "host", "time of a step"), rows


def measured_block(path: Path) -> str:
    """The measured ladder as a table, or where it would come from."""
    try:
        header, rows = lever_rows(path)
    except UserError:
        return "`python benchmarks/levers.py --ladder` measures them."
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
