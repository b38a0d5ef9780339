"""A card that is not in the catalog, from a YAML row with the columns of cards.csv; in a machine `2x./card.yaml`.

family: A6000-modded        # what plans call it
memory_gb: 96
bandwidth_gb_s: 768
fp32: 38.7                  # dense TFLOP/s; leave out what the card has no unit for
fp16: 154.8
bf16: 154.8
host_link: pcie4            # `tightfit hardware --json` shows the links' names
peer_link: pcie4
usable_gib: 94.5            # optional, as are power_w, form, network, bridge, source, note
"""

from pathlib import Path
from typing import Any

from tightfit.bounded_yaml import read_yaml_file
from tightfit.errors import UserError
from tightfit.hardware.accelerator import Accelerator
from tightfit.hardware.catalog import FORMS, RATES, accelerator_of_row
from tightfit.hardware.links import LINKS, NETWORKS

NEEDED = ("family", "memory_gb", "bandwidth_gb_s", "fp32", "host_link", "peer_link")
OPTIONAL = (*RATES, "form", "network", "bridge", "usable_gib", "power_w", "source", "note")
NUMBERS = ("memory_gb", "bandwidth_gb_s", "usable_gib", "power_w", *RATES)
WORDS = {"form": FORMS, "host_link": LINKS, "peer_link": LINKS, "network": NETWORKS, "bridge": LINKS}


def own_card(path: Path) -> Accelerator:
    """The card that `path` describes."""
    row = _read(path)
    missing = [name for name in NEEDED if name not in row]
    if missing:
        raise UserError(f"{path} has no {missing[0]}; a card needs {', '.join(NEEDED)}")
    unknown = sorted(set(row) - {*NEEDED, *OPTIONAL})
    if unknown:
        raise UserError(
            f"{path} has a field {unknown[0]!r}; a card has {', '.join(dict.fromkeys((*NEEDED, *OPTIONAL)))}"
        )
    for name in NUMBERS:
        _check_number(path, name, row.get(name, 1))
    for name, known in WORDS.items():
        if name in row and str(row[name]) not in known:
            raise UserError(f"{path} has {name} {row[name]!r}; give one of {', '.join(known)}")
    if not isinstance(row["family"], str) or not row["family"].strip():
        raise UserError(f"{path} has family {row['family']!r}; give the card's name as text")
    if row["memory_gb"] != int(row["memory_gb"]):
        raise UserError(f"{path} has memory_gb {row['memory_gb']}; give whole gigabytes, and the rest in usable_gib")
    if row.get("usable_gib", 0) > row["memory_gb"]:
        raise UserError(f"{path} has usable_gib {row['usable_gib']}, more than its memory_gb {row['memory_gb']}")
    texts = {name: str(value) for name, value in row.items()}
    return accelerator_of_row({"form": "pcie", "source": path.name, **texts, "memory_gb": str(int(row["memory_gb"]))})


def _check_number(path: Path, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise UserError(f"{path} has {name} {value!r}; give a number above 0")


def _read(path: Path) -> dict[str, Any]:
    found = read_yaml_file(path, "a card", remedy="give a YAML file with one row")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise UserError(f"{path} is not a card; give fields such as family, memory_gb and fp32")
    return found
