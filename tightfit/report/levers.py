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
