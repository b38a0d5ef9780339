"""The catalog: one row of cards.csv per accelerator, each with its source.

Rates are dense, with float32 sums; sparse ones are twice as large and not used. GeForce cards sum fp16 products in
float32 at half the rate of their data sheets' headline. `usable_gib` is the total that PyTorch names in its
out-of-memory message on that card (public bug reports; the lowest seen where they differ; for the H200 our own). Rows
without it plan with the vendor's decimal gigabytes. A name that is not here is an error with near names: nothing is
guessed.
"""

import csv
import difflib
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tightfit.errors import UserError
from tightfit.hardware.accelerator import Accelerator, PeakRates

CARDS = Path(__file__).parent / "cards.csv"
RATES = tuple(PeakRates.__dataclass_fields__)


def accelerator_of_row(row: Mapping[str, str]) -> Accelerator:
    """One row of the table; empty cells are unknown."""
    given = {name: value for name, value in row.items() if value not in ("", None)}
    return Accelerator(
        family=given["family"],
        memory_gb=int(given["memory_gb"]),
        form=given["form"],
        bandwidth_gb_s=float(given["bandwidth_gb_s"]),
        rates=PeakRates(**{name: float(given[name]) for name in RATES if name in given}),
        host_link=given["host_link"],
        peer_link=given["peer_link"],
        network=given.get("network"),
        bridge=given.get("bridge"),
        usable_gib=float(given["usable_gib"]) if "usable_gib" in given else None,
        power_w=float(given["power_w"]) if "power_w" in given else None,
        source=given["source"],
        note=given.get("note", ""),
    )


def row_of_accelerator(card: Accelerator) -> dict[str, Any]:
    """An accelerator as a row of the catalog, without unknown fields."""
    row = {name: value for name, value in asdict(card).items() if name != "rates"} | asdict(card.rates)
    return {name: value for name, value in row.items() if value is not None and value != ""}


def _read() -> tuple[Accelerator, ...]:
    with CARDS.open(encoding="utf-8", newline="") as file:
        return tuple(accelerator_of_row(row) for row in csv.DictReader(file))


CATALOG: tuple[Accelerator, ...] = _read()
FORMS = tuple(dict.fromkeys(row.form for row in CATALOG))


def find_accelerator(name: str, form: str | None = None) -> Accelerator:
    """The row called `name` (`V100-32GB`; the size may be left out where there is only one), in `form` if given.

    Without `form` the first row is taken, which has the fastest links.
    """
    rows = [row for row in CATALOG if _same(name, row)]
    if len({row.memory_gb for row in rows}) > 1:
        sizes = " or ".join(dict.fromkeys(row.name for row in rows))
        raise UserError(f"accelerator {name!r} comes in several sizes; write {sizes}")
    if not rows:
        raise UserError(f"there is no accelerator {name!r} in the catalog; {near_cards(name)}")
    if form is None:
        return rows[0]
    for row in rows:
        if row.form == form:
            return row
    raise UserError(f"{rows[0].name} does not come as {form!r}; write {' or '.join(row.form for row in rows)}")


def larger_cards(card: Accelerator) -> list[Accelerator]:
    """Cards of the same vendor with more memory, the smallest first; whole computers (superchips, SoCs) only in place
    of cards of the same form."""
    whole = {"superchip", "soc"} - {card.form}
    same = (row for row in CATALOG if row.vendor == card.vendor and row.form not in whole)
    return sorted((row for row in same if row.memory_bytes > card.memory_bytes), key=lambda row: row.memory_bytes)


def _plain(name: str) -> str:
    """`name` as it is compared: without case, marks, a vendor before it, or the i in a size such as 80GiB."""
    letters = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"(?<=\dg)ib$", "b", letters).removeprefix("nvidia").removeprefix("amd").removeprefix("geforce")


def _same(name: str, row: Accelerator) -> bool:
    return _plain(name) in (_plain(row.family), _plain(row.name))


def near_cards(name: str) -> str:
    """A hint with cards whose family is spelled like `name`, its memory size aside."""
    families = {_plain(row.family): row.family for row in CATALOG}
    asked = _plain(re.sub(r"[-_ ]\d+ ?gi?b$", "", name, flags=re.IGNORECASE))
    longer = [each for each in families if asked in each]
    near = [families[each] for each in difflib.get_close_matches(asked, longer or families, n=2, cutoff=0.5)]
    names = list(dict.fromkeys(row.name for row in CATALOG if row.family in near))
    if near:
        return f"did you mean {' or '.join(names)}?"
    return "`tightfit hardware` lists what it has, and a card of your own is a YAML row: --on 2x./card.yaml"
