"""Prints a diagnosis: one screen, or one JSON object."""

from typing import TYPE_CHECKING

from rich.table import Table

from tightfit.counted import counted
from tightfit.hardware.collective_rates import OPERATIONS
from tightfit.report.console import output_console
from tightfit.report.escaping import escape
from tightfit.report.tables import print_json

if TYPE_CHECKING:
    from tightfit.hardware.collective_rates import CollectiveRates
    from tightfit.prove.doctor import Diagnosis

COLOURS = {"fine": "green", "note": "yellow", "wrong": "red"}


def print_diagnosis(diagnosis: "Diagnosis", *, as_json: bool) -> None:
    """Findings, collectives' rates, and the verdict in the last line. Splits that are fine share one line."""
    if as_json:
        return print_json(diagnosis.to_json())
    console = output_console()
    splits = [each for each in diagnosis.findings if each.words.startswith("as one process")]
    table = Table("what", "verdict", "found", box=None, title_justify="left", padding=(0, 1))
    for each in (each for each in diagnosis.findings if each not in splits):
        table.add_row(each.what, f"[{COLOURS[each.verdict]}]{each.verdict}[/]", escape(each.words))
    if splits:
        named = ", ".join(each.what for each in splits)
        table.add_row(counted(len(splits), "split"), "[green]fine[/]", escape(f"train as one process does: {named}"))
    console.print(table)
    if diagnosis.rates is not None:
        console.print(_rates_table(diagnosis.rates))
    if diagnosis.calibration_file:
        console.print(f"written to {escape(diagnosis.calibration_file)}; `tightfit plan --on local` uses it")
    wrong = [f"{each.what}: {each.words}" for each in diagnosis.findings if each.verdict == "wrong"]
    verdict = f"[red]{escape(wrong[0])}[/]" if wrong else "[green]healthy[/]"
    console.print(f"{diagnosis.ranks} ranks of {escape(diagnosis.device)}, {diagnosis.seconds:.0f} s: {verdict}")


def _rates_table(rates: "CollectiveRates") -> Table:
    table = Table(box=None, padding=(0, 1))
    table.add_column("collective")
    sizes = sorted({point.payload_bytes for point in rates.of("all-reduce")})
    for size in sizes:
        table.add_column(_size(size), justify="right")
    table.add_column("GB/s sent", justify="right")
    for name in OPERATIONS:
        times = [f"{point.us:,.0f} µs" for point in rates.of(name)]
        table.add_row(name, *times, f"{rates.wire_bytes_s(name) / 1e9:,.2f}")
    return table


def _size(count: int) -> str:
    return f"{count / 2**20:.0f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"
