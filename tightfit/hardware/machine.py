"""Machine: nodes × accelerators and their links, as a user writes it.

    H100-80GB               one card
    8xV100-32GB             one node of eight, with the links of the vendor's own system (SXM where there is one)
    4xA100-40GB:pcie        PCIe cards
    2x8xH100-80GB           two nodes of eight, with the network of the vendor's reference system (NDR, one per card)
    4x8xL4:ethernet-100     between nodes: edr, hdr, ndr, xdr (per card), ethernet-10 … -400 (per node)
    2xRTX3090:nvlink        a pair of cards with their bridge
    2x./card.yaml           two cards of one's own, described in a file (own_card.py)
    local                   what nvidia-smi finds in this machine

Cards without a vendor's reference network are assumed to share one 100 Gb/s Ethernet port per node unless the text
names another; a plan prints the link it used.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tightfit.errors import UserError
from tightfit.hardware.accelerator import Accelerator
from tightfit.hardware.calibration import Calibration
from tightfit.hardware.catalog import (
    CATALOG,
    FORMS,
    accelerator_of_row,
    find_accelerator,
    near_cards,
    row_of_accelerator,
)
from tightfit.hardware.collective_rates import PeerRates
from tightfit.hardware.links import LINKS, NETWORKS, Link
from tightfit.hardware.sizes import parse_bytes

LARGEST = 1_000_000
LONGEST_NAME = 100
"""Characters of a card's name that near ones are looked up by."""
DEFAULT_NETWORK = "ethernet-100"
BRIDGE = "nvlink"
"""The word that asks for a pair's bridge."""
_COUNTS, _OPTIONS = r"(?:(-?\d+)x)?(?:(-?\d+)x)?", r"((?::[\w.-]+)*)"
_PATTERN = re.compile(rf"{_COUNTS}([A-Za-z][\w .-]*){_OPTIONS}")
_FILE_PATTERN = re.compile(rf"{_COUNTS}([^:]+\.ya?ml){_OPTIONS}")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`nodes` × `per_node` accelerators. `host_bytes` is the memory of one node; None where unknown."""

    nodes: int
    per_node: int
    accelerator: Accelerator
    intra: Link
    inter: Link
    host_bytes: int | None = None
    text: str
    calibration: Calibration | None = field(default=None, compare=False)
    """Rates measured on this machine; None for a machine that is only named."""

    @property
    def is_cpu(self) -> bool:
        """Whether its one device is its own CPU."""
        return self.accelerator.form == "cpu"

    @property
    def host_copy_bytes_s(self) -> float:
        """Bytes a second of a pinned copy between a card and its host."""
        return self.accelerator.host.copy_bytes_s if self.calibration is None else self.calibration.link_gb_s * 1e9

    @property
    def peers(self) -> PeerRates:
        """Rates of collectives inside a node: measured here by `tightfit doctor`, else expected of the link."""
        if self.calibration is None or self.calibration.collectives is None:
            return PeerRates.of_link(self.intra)
        return self.calibration.collectives.peer_rates()

    @property
    def ranks(self) -> int:
        """All accelerators."""
        return self.nodes * self.per_node

    def with_counts(self, nodes: int, per_node: int) -> "Machine":
        """The same accelerators and links in another number; a bridge, which joins two cards of a node, is left out
        where there are not two."""
        name, *words = self.text.split(":")
        intra, peer = self.intra, self.accelerator.peer
        if per_node != 2 and intra != peer and peer.kind != "fabric":
            words, intra = [word for word in words if word.lower() != BRIDGE], peer
        plain = re.sub(r"^(\d+x){0,2}", "", name)
        text = ":".join([f"{_counts(nodes, per_node)}{plain}", *words])
        return replace(self, nodes=nodes, per_node=per_node, intra=intra, text=text)

    def with_card(self, card: Accelerator) -> "Machine":
        """As many of another card with the links of its vendor; what was measured here is not known of it."""
        host_bytes = None if self.accelerator.shares_memory else self.host_bytes
        return replace(
            self,
            accelerator=card,
            intra=card.peer,
            inter=LINKS[card.network or DEFAULT_NETWORK],
            host_bytes=0 if card.shares_memory else host_bytes,
            text=f"{_counts(self.nodes, self.per_node)}{card.name}",
            calibration=None,
        )

    def to_json(self) -> dict[str, Any]:
        """As plain data, which `machine_of_json` reads back."""
        known = self.accelerator in CATALOG
        return {
            **({} if known else {"card": row_of_accelerator(self.accelerator)}),
            **({} if self.calibration is None else {"calibration": self.calibration.to_json()}),
            "text": self.text,
            "nodes": self.nodes,
            "per_node": self.per_node,
            "accelerator": self.accelerator.name,
            "accelerator_bytes": self.accelerator.memory_bytes,
            "intra": self.intra.name,
            "inter": self.inter.name,
            "host_bytes": self.host_bytes,
        }


def parse_machine(text: str, host_memory: str | int | None = None) -> Machine:
    """The machine that `text` names; `host_memory` (`512GB`, or bytes) is that of one node."""
    if text.strip() == "local":
        from tightfit.hardware.local import local_machine

        return local_machine(host_memory)
    file = _FILE_PATTERN.fullmatch(text.strip())
    match = file or _PATTERN.fullmatch(text.strip())
    if match is None:
        card = re.sub(r"^(-?\d+x)*", "", text.strip())[:LONGEST_NAME]
        raise UserError(
            f"machine {text!r} is not of the form 8xV100-32GB, 2x8xH100-80GB or H100-80GB:pcie; {near_cards(card)}"
        )
    first, second, name, tail = match.groups()
    nodes, per_node = (int(first), int(second)) if second else (1, int(first or 1))
    _check_counts(text, nodes, per_node)
    form, intra, inter = _options(text, tail.split(":")[1:])
    accelerator = _own_card(name) if file else find_accelerator(name, form)
    return Machine(
        nodes=nodes,
        per_node=per_node,
        accelerator=accelerator,
        intra=_bridge(text, accelerator, per_node) if intra else accelerator.peer,
        inter=LINKS[inter or accelerator.network or DEFAULT_NETWORK],
        host_bytes=_host_bytes(host_memory, accelerator),
        text=text.strip(),
    )


def machine_of_json(data: Mapping[str, Any]) -> Machine:
    """The machine from `to_json`'s data, which has the row of a card that is not in the catalog, and a calibration."""
    calibration = Calibration.from_json(data["calibration"]) if "calibration" in data else None
    if "card" not in data:
        return replace(parse_machine(data["text"], data["host_bytes"]), calibration=calibration)
    accelerator = accelerator_of_row({name: str(value) for name, value in data["card"].items()})
    return Machine(
        nodes=data["nodes"],
        per_node=data["per_node"],
        accelerator=accelerator,
        intra=LINKS[data["intra"]],
        inter=LINKS[data["inter"]],
        host_bytes=data["host_bytes"],
        text=data["text"],
        calibration=calibration,
    )


def _counts(nodes: int, per_node: int) -> str:
    return f"{nodes}x{per_node}x" if nodes > 1 else f"{per_node}x"


def _own_card(path: str) -> Accelerator:
    from tightfit.hardware.own_card import own_card  # imports YAML, which few plans need

    return own_card(Path(path))


def _check_counts(text: str, nodes: int, per_node: int) -> None:
    for count, what in ((nodes, "nodes"), (per_node, "GPUs")):
        if count < 1:
            raise UserError(f"machine {text!r} has {count} {what}; give at least 1")
    if nodes * per_node > LARGEST:
        raise UserError(f"machine {text!r} has {nodes * per_node} GPUs; give at most {LARGEST:,}")


def _options(text: str, words: list[str]) -> tuple[str | None, bool, str | None]:
    """The form, whether cards are bridged, and the network that the words after the colons ask for."""
    asked = [word.lower() for word in words]
    known = (*FORMS, BRIDGE, *NETWORKS)
    for word in asked:
        if word not in known:
            raise UserError(f"machine {text!r} asks for {word!r}; after a colon stands one of {', '.join(known)}")
    return _one_of(text, asked, FORMS), BRIDGE in asked, _one_of(text, asked, NETWORKS)


def _one_of(text: str, asked: list[str], known: tuple[str, ...]) -> str | None:
    found = list(dict.fromkeys(word for word in asked if word in known))
    if len(found) > 1:
        raise UserError(f"machine {text!r} asks for {' and for '.join(found)}; give one of them")
    return found[0] if found else None


def _bridge(text: str, accelerator: Accelerator, per_node: int) -> Link:
    if accelerator.peer.kind == "fabric":
        return accelerator.peer
    if accelerator.bridge is None or per_node != 2:
        raise UserError(
            f"machine {text!r} asks for nvlink, but {accelerator.name} ({accelerator.form}) has "
            f"{'bridges for pairs only' if accelerator.bridge else 'none'}; leave it out"
        )
    return LINKS[accelerator.bridge]


def _host_bytes(host_memory: str | int | None, accelerator: Accelerator) -> int | None:
    """Host memory of a node; 0 where host and card share one memory."""
    if accelerator.shares_memory:
        if isinstance(host_memory, str):
            raise UserError(
                f"--host-memory is {host_memory!r}, but {accelerator.name} has one memory for both; leave it out"
            )
        return 0
    if host_memory is None or isinstance(host_memory, int):
        return host_memory
    found = parse_bytes(host_memory, "--host-memory")
    if found < 1:
        raise UserError(f"--host-memory is {host_memory!r}; give what one node has, such as 512GB")
    return found
