"""Measurements of kernels as tables, rows and a picture."""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benchmarks.rows import append_row, picture_folder, version_of
from tightfit.report.escaping import escape
from tightfit.report.figure import panels
from tightfit.report.tables import gib, print_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from benchmarks.operations.measure import Limits
    from benchmarks.operations.run import Measurement

Row = dict[str, str]
COLUMNS = ("peer", "ms (20 % to 80 %)", "of the limit", "extra memory", "first call", "difference")
COLORS = {"tightfit": "#1f5fa8", "CUDA C++": "#4c9f70", "Liger": "#e0a458"}
"""Everything that is not ours or compared with by name is grey."""


def show_kernels(limits: "Limits", measurements: Iterable["Measurement"], *, as_json: bool) -> list["Measurement"]:
    """Print each case as soon as it is measured (or everything as one JSON object), and return all measurements."""
    if as_json:
        made = list(measurements)
        print_json({"limits": asdict(limits), "measurements": [asdict(m) for m in made]})
        return made
    console = Console(width=110)
    console.print(
        f"limits measured here: copy {limits.copy_gb_s:,.0f} GB/s, matrix product {limits.gemm_tflop_s:,.1f} TFLOP/s",
        highlight=False,
    )
    made = []
    for title, case in _by_case(measurements):
        console.print(_table(title, case))
        made += case
    return made


def _by_case(measurements: Iterable["Measurement"]) -> Iterator[tuple[str, list["Measurement"]]]:
    """Consecutive measurements of one case, with its name."""
    for key, group in groupby(measurements, lambda m: (m.operation, m.shape, m.dtype)):
        yield f"{key[0]}  {key[1]}  {key[2]}", list(group)


def _table(title: str, case: list["Measurement"]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for m in case:
        if m.timing is None:
            table.add_row(m.peer, escape(m.note))
            continue
        spread = f"{m.timing.p50_ms:.3f} ({m.timing.p20_ms:.3f}–{m.timing.p80_ms:.3f})"
        table.add_row(
            m.peer,
            spread,
            f"{m.share_of_limit or 0:.1%}",
            gib(m.extra_bytes or 0),
            f"{m.first_call_s or 0:.2f} s",
            f"{m.difference or 0:.1e}",
        )
    return table


def recorded(
    limits: "Limits", measurements: Iterable["Measurement"], folder: Path, commit: str | None
) -> Iterator["Measurement"]:
    """The same measurements, each appended to `folder/kernels.csv` as it is made: a run cut short keeps its rows."""
    for m in measurements:
        append_row("kernels", _row(limits, m), folder=folder, commit=commit)
        yield m


def _row(limits: "Limits", m: "Measurement") -> dict[str, Any]:
    timing = m.timing
    return {
        "triton": version_of("triton"),
        "liger_kernel": version_of("liger-kernel"),
        "copy_gb_s": f"{limits.copy_gb_s:.0f}",
        "gemm_tflop_s": f"{limits.gemm_tflop_s:.1f}",
        "operation": m.operation,
        "shape": m.shape,
        "dtype": m.dtype,
        "peer": m.peer,
        "ms_p20": "" if timing is None else f"{timing.p20_ms:.4f}",
        "ms_p50": "" if timing is None else f"{timing.p50_ms:.4f}",
        "ms_p80": "" if timing is None else f"{timing.p80_ms:.4f}",
        "share_of_limit": "" if m.share_of_limit is None else f"{m.share_of_limit:.4f}",
        "extra_mib": "" if m.extra_bytes is None else f"{m.extra_bytes / 2**20:.2f}",
        "first_call_s": "" if m.first_call_s is None else f"{m.first_call_s:.3f}",
        "difference": "" if m.difference is None else f"{m.difference:.2e}",
        "note": m.note,
    }


GROUPS = {
    "norms": ("rms_norm", "layer_norm"),
    "elementwise": ("glu", "rope"),
    "losses": ("cross_entropy", "linear_cross_entropy"),
    "attention": ("attention",),
}
"""Operations that share a picture; others have one of their own."""


def draw_kernels(results: Path) -> list[Path]:
    """Pictures of the newest rows, one per group of operations: how fast each peer is beside a copy or a product."""
    cases, last = _newest(results)
    groups: dict[str, dict[str, dict[str, Row]]] = {}
    for title, case in cases.items():
        operation = title.split()[0]
        group = next((name for name, members in GROUPS.items() if operation in members), operation)
        groups.setdefault(group, {})[title] = case
    return [_draw_group(name, group, last, picture_folder(results.parent)) for name, group in groups.items()]


def _draw_group(name: str, cases: dict[str, dict[str, Row]], last: Row, folder: Path) -> Path:
    columns = min(2, len(cases))
    rows = -(-len(cases) // columns)
    picture = folder / f"kernels-{name}.png"
    with panels(picture, rows, columns, width=5.6 * columns, height=0.9 + 2.0 * rows) as (figure, axes):
        for panel, (title, case) in zip(axes.flat, cases.items(), strict=False):
            _draw_case(panel, title, case)
        for panel in axes.flat[len(cases) :]:
            panel.set_axis_off()
        figure.suptitle(
            f"{last['device']}, torch {last['torch']}, forward and backward. 100 % is this card's own copy "
            f"({float(last['copy_gb_s']):,.0f} GB/s)\nor matrix product ({float(last['gemm_tflop_s']):,.0f} TFLOP/s) "
            "doing the least possible work; reading more than one writes can be faster than a copy"
        )
    return picture


def _newest(results: Path) -> tuple[dict[str, dict[str, Row]], Row]:
    """By case and peer, the newest row of the device measured last that has a time; and the last row."""
    with results.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["device"] == rows[-1]["device"] and row["ms_p50"]:
            title = f"{row['operation']}  {row['shape']}  {row['dtype']}"
            cases.setdefault(title, {})[row["peer"]] = row
    return cases, rows[-1]


def _draw_case(panel: "Axes", title: str, case: dict[str, Row]) -> None:
    shares = [100 * float(row["share_of_limit"]) for row in case.values()]
    colors = [next((c for name, c in COLORS.items() if peer.startswith(name)), "#b8b8b8") for peer in case]
    panel.barh(list(case), shares, color=colors, height=0.7)
    for index, (row, share) in enumerate(zip(case.values(), shares, strict=True)):
        label = panel.text(share + 1, index, f"{share:.0f} %  {float(row['ms_p50']):.3g} ms", va="center", fontsize=8)
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.4})  # the line at 100 % passes behind it
    panel.axvline(100, color="#888888", linewidth=0.8, linestyle=":", zorder=0.5)
    panel.set(xlim=(0, max(140, max(shares) + 40)), xticks=(0, 25, 50, 75, 100))
    panel.set_title(title, fontsize=9, loc="left")
    panel.invert_yaxis()
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)
