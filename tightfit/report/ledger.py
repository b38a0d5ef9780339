"""Tables of `tightfit measure` and `tightfit compare`: a ledger by phase and component, and two ledgers compared."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from tightfit.counted import counted
from tightfit.memory.comparison import Comparison, Pair
from tightfit.memory.ledger import COMPONENTS, Ledger, Place
from tightfit.report.console import output_console
from tightfit.report.escaping import escape
from tightfit.report.tables import count_name, gib, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tightfit.memory.trace import Allocation
    from tightfit.prove.measured_run import MeasuredRun

KIB = 2**10


def print_measured(found: "MeasuredRun", file: Path, picture: Path, *, as_json: bool) -> None:
    """The ledger, the largest tensors at its peak, and where both were written."""
    if as_json:
        return print_json({**found.to_json(), "run": found.run, "file": file, "picture": picture})
    console = output_console()
    console.print(
        f"[bold]{count_name(found.params)} parameters, {found.precision}, {escape(found.device)}[/bold]: "
        f"{counted(len(found.losses), 'step')}, last loss {found.losses[-1]:.3f}"
    )
    console.print(ledger_table(found.ledger))
    console.print(largest_table(found.largest))
    console.print(f"[dim]· wrote {escape(str(file))} and {escape(str(picture))}[/dim]", soft_wrap=True)
    console.print(
        f"[dim]· lay a prediction beside it with `tightfit compare plan.json {escape(str(found.run))}`[/dim]",
        soft_wrap=True,
    )


def size(count: float) -> str:
    """Bytes in GiB, MiB, KiB or B."""
    if not count:
        return "–"
    return gib(count) if count >= 10 * 2**20 else f"{count / 2**20:.2f} MiB" if count >= 0.1 * 2**20 else _small(count)


def _small(count: float) -> str:
    return f"{count / KIB:.1f} KiB" if count >= KIB else f"{count:.0f} B"


def ledger_table(ledger: Ledger) -> Table:
    """One row per component and one column per phase; the phase of the peak is marked."""
    place: Place = "gpu" if ledger.moments("gpu") else "host"
    fullest = ledger.fullest(place)
    columns = [(moment, ledger.by_component(*moment, place)) for moment in ledger.moments(place)]
    where = "on the GPU" if place == "gpu" else "in host memory"
    table = Table(title=f"At the fullest moment of each phase, {where}", title_justify="left", box=None, padding=(0, 1))
    table.add_column("", no_wrap=True)
    for moment, _ in columns:
        mark = " ◀" if moment == fullest else ""
        rank = f" ({moment[1]})" if moment[1] else ""
        table.add_column(f"{moment[0]}{rank}{mark}", justify="right", style="bold" if mark else "", no_wrap=True)
    for component in COMPONENTS:
        if any(component in held for _, held in columns):
            table.add_row(component, *(size(held.get(component, 0)) for _, held in columns))
    table.add_section()
    table.add_row("allocated", *(size(ledger.allocated_bytes(*moment, place)) for moment, _ in columns), style="bold")
    return table


def largest_table(largest: "Sequence[tuple[Allocation, int]]") -> Table:
    """The largest kinds of tensors alive at the peak."""
    table = Table(title="Largest tensors alive at the peak", title_justify="left", box=None, padding=(0, 1))
    for column in ("all", "count", "each"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("kind", "module", "operation"):
        table.add_column(column, overflow="fold")
    for kind, count in largest:
        name = f"{kind.component}: {kind.detail}" if kind.detail else kind.component
        table.add_row(
            size(kind.bytes * count),
            f"{count:,}",
            size(kind.bytes),
            name,
            escape(kind.module),
            escape(kind.operation.removeprefix("aten.").removesuffix(".default")),
        )
    return table


def print_comparison(
    comparison: Comparison, predicted: tuple[str, Ledger], measured: tuple[str, Ledger], *, as_json: bool
) -> None:
    """Both ledgers, each with the name of its file, and the error of each line."""
    if as_json:
        names = {"predicted": predicted[0], "measured": measured[0]}
        sources = {"predicted_source": predicted[1].source, "measured_source": measured[1].source}
        return print_json({**names, **sources, **comparison.to_json()})
    console = output_console()
    table = Table(box=None, padding=(0, 1))
    for column in ("phase", "component"):
        table.add_column(column, no_wrap=True)
    for name, ledger in (predicted, measured):
        table.add_column(f"{ledger.source}\n{name}", justify="right", overflow="fold")
    table.add_column("error", justify="right", no_wrap=True)
    phase = ""
    for pair in comparison.pairs:
        table.add_row(
            pair.phase if pair.phase != phase else "",
            pair.component or "all of it",
            *_cells(pair),
            style="bold" if pair.component is None else "",
            end_section=pair.component is None,
        )
        phase = pair.phase
    table.add_row("peak", "allocated", *_cells(comparison.allocated), style="bold")
    if comparison.reserved is not None:
        table.add_row("", "reserved", *_cells(comparison.reserved), style="bold")
    console.print(table)
    if comparison.reserved is None:
        console.print(
            "[dim]· in host memory tensors are all that is counted; a GPU's workspaces and slack are not[/dim]"
        )


def _cells(pair: Pair) -> tuple[str, str, str]:
    error = "–" if pair.error is None else f"{pair.error:+.1%}"
    return size(pair.predicted_bytes), size(pair.measured_bytes), error
