"""What `tightfit hardware` prints: the catalog of accelerators, or one of them with its sources."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from tightfit.hardware.accelerator import Accelerator
from tightfit.hardware.calibration import Calibration, read_calibrations
from tightfit.hardware.catalog import CATALOG
from tightfit.report.console import UNWRAPPED, output_console
from tightfit.report.tables import gib, print_json, print_pairs

WITH_SOURCES = 150
"""Columns from which on sources are shown beside the figures."""


def print_catalog(cards: tuple[Accelerator, ...] = CATALOG, *, as_json: bool) -> None:
    """Every accelerator with its figures and, where there is room, sources; what was measured on this machine."""
    if as_json:
        return print_json([_card_facts(card) for card in cards])
    columns = output_console().width
    console = Console(width=WITH_SOURCES if columns == UNWRAPPED else columns)
    has_sources = console.width >= WITH_SOURCES
    console.print(_table(cards, has_sources=has_sources))
    if not has_sources:
        console.print("[dim]· `tightfit hardware NAME` shows one card with its links' rates and source[/dim]")
    for entry in read_calibrations().values():
        console.print(_measured(entry))


def print_card(card: Accelerator, *, as_json: bool) -> None:
    """All that the catalog says of one card."""
    if as_json:
        return print_json([_card_facts(card)])
    rates = {f"{name} TFLOP/s": rate for name, rate in asdict(card.rates).items()}
    told = "as its driver reports it" if card.usable_gib else "the vendor's figure in decimal gigabytes"
    facts = {
        "form": card.form,
        "usable memory": f"{gib(card.memory_bytes)} ({told})",
        "bandwidth": f"{card.bandwidth_gb_s:,g} GB/s",
        **rates,
        "between cards": _link(card.peer.name, card.peer.gb_s),
        "to the host": _link(card.host.name, card.host.gb_s),
        "power limit": f"{card.power_w:g} W" if card.power_w else None,
        "source": card.source,
        "note": card.note or None,
    }
    print_pairs(f"{card.name} (dense TFLOP/s)", facts)


def _table(cards: tuple[Accelerator, ...], *, has_sources: bool) -> Table:
    """A line per card; with sources also the links' rates."""
    title = "Accelerators (dense TFLOP/s" + ("; links GB/s one way)" if has_sources else ")")
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), pad_edge=False)
    for column in ("name", "form", "usable", "GB/s", "fp32", "fp16", "bf16", "fp8"):
        table.add_column(column, no_wrap=True)
    for column in ("between", "host", *(["source"] if has_sources else [])):
        table.add_column(column, overflow="fold")
    for card in cards:
        each = card.rates
        table.add_row(
            card.name,
            card.form,
            gib(card.memory_bytes),
            f"{card.bandwidth_gb_s:g}",
            *(f"{rate:g}" if rate else "–" for rate in (each.fp32, each.fp16, each.bf16, each.fp8)),
            *(f"{link.name} {link.gb_s:g}" if has_sources else link.name for link in (card.peer, card.host)),
            *([card.source] if has_sources else []),
        )
    return table


def _link(name: str, gb_s: float) -> str:
    return f"{name}, {gb_s:g} GB/s one way"


def _measured(entry: Calibration) -> str:
    """One line with the rates that `tightfit calibrate` measured on a device."""
    products = ", ".join(f"{name} {rate:,.3g}" for name, rate in entry.products_tflop_s.items())
    return (
        f"measured on {entry.device} on {entry.date}: products {products} TFLOP/s, "
        f"copies {entry.copy_gb_s:,.0f} GB/s, host link {entry.link_gb_s:,.1f} GB/s, "
        f"a layer's launches {entry.layer_launch_ms:.2f} ms"
    )


def _card_facts(card: Accelerator) -> dict[str, Any]:
    return {"name": card.name, "memory_bytes": card.memory_bytes, **asdict(card)}
