"""Accelerator: memory, peak rates and links of one card."""

import re
from dataclasses import dataclass
from typing import Literal

from tightfit.hardware.links import LINKS, Link

Number = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "int8"]


@dataclass(frozen=True, kw_only=True)
class PeakRates:
    """Dense TFLOP/s (TOP/s for int8) with float32 accumulation; None where the card has no such unit."""

    fp32: float
    tf32: float | None = None
    fp16: float | None = None
    bf16: float | None = None
    fp8: float | None = None
    int8: float | None = None

    def of(self, number: Number) -> float | None:
        """The rate of one number format."""
        rate: float | None = getattr(self, number)
        return rate


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One row of the catalog.

    `memory_gb` is what the vendor prints. `usable_gib` is what CUDA reports to a program as the card's total, where
    that is known: firmware and error correction keep some, so it is what a plan must fit in.
    """

    family: str
    memory_gb: int
    form: str
    bandwidth_gb_s: float
    rates: PeakRates
    host_link: str
    peer_link: str
    """Between the cards of a node: a fabric, or the PCIe that also leads to the host."""
    network: str | None = None
    """Per card, in the vendor's own reference system; None where there is none."""
    bridge: str | None = None
    """Between two cards, if they are bought with it."""
    usable_gib: float | None = None
    power_w: float | None = None
    """What it may draw; None where unknown."""
    source: str
    note: str = ""

    @property
    def name(self) -> str:
        """As it is written in a machine, without the form."""
        return f"{self.family}-{self.memory_gb}GB"

    @property
    def vendor(self) -> str:
        """Who makes it: NVIDIA unless the name is AMD's or Apple's."""
        if re.match(r"MI\d", self.family):
            return "AMD"
        return "Apple" if re.match(r"M\d", self.family) else "NVIDIA"

    @property
    def memory_bytes(self) -> int:
        """What a plan may use: what CUDA reports, or the vendor's figure read as decimal gigabytes."""
        return int(self.usable_gib * 2**30) if self.usable_gib else self.memory_gb * 10**9

    @property
    def peer(self) -> Link:
        """The link between the cards of a node."""
        return LINKS[self.peer_link]

    @property
    def host(self) -> Link:
        """The link to the memory of the node."""
        return LINKS[self.host_link]

    @property
    def shares_memory(self) -> bool:
        """Whether its memory is the processor's too, so that there is no other to keep anything in."""
        return self.host_link == "unified"
