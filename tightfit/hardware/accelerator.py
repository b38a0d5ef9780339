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

    `memory_gb` is the vendor's figure. `usable_gib` is the total that CUDA reports to a program, where known: firmware
    and error correction reserve some, so this is what a plan must fit in.
    """

    family: str
    memory_gb: int
    form: str
    bandwidth_gb_s: float
    rates: PeakRates
    host_link: str
    peer_link: str
    """Link between the cards of a node: a fabric such as NVLink, or the PCIe that also leads to the host."""
    network: str | None = None
    """Network per card in the vendor's reference system; None where there is none."""
    bridge: str | None = None
    """Optional link between two cards (an NVLink bridge); None where the card has none."""
    usable_gib: float | None = None
    power_w: float | None = None
    """Power limit; None where unknown."""
    source: str
    note: str = ""

    @property
    def name(self) -> str:
        """The name used in a machine's text, without the form."""
        return f"{self.family}-{self.memory_gb}GB"

    @property
    def vendor(self) -> str:
        """The vendor: NVIDIA unless the name is AMD's or Apple's."""
        if re.match(r"MI\d", self.family):
            return "AMD"
        return "Apple" if re.match(r"M\d", self.family) else "NVIDIA"

    @property
    def memory_bytes(self) -> int:
        """Memory that a plan may use: the total that CUDA reports, else the vendor's figure as decimal gigabytes."""
        return int(self.usable_gib * 2**30) if self.usable_gib else self.memory_gb * 10**9

    @property
    def peer(self) -> Link:
        """The link between the cards of a node."""
        return LINKS[self.peer_link]

    @property
    def host(self) -> Link:
        """The link to the host's memory."""
        return LINKS[self.host_link]

    @property
    def shares_memory(self) -> bool:
        """Whether host and card share one memory, so that nothing can be offloaded."""
        return self.host_link == "unified"
