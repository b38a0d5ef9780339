"""Links between accelerators, between nodes, and between an accelerator and its host.

`gb_s` is the vendor's rate in one direction: of all lanes of one accelerator (NVLink, PCIe ×16), or of one port
(InfiniBand, Ethernet). COLLECTIVE_SHARE is the share that collectives reach, and HOP_US the latency of one ring step;
neither is our measurement, except that a pinned copy to the host reached 55 of 63 GB/s (PCIe 5, with an H200).
Sources: rates are the standards' (PCI-SIG, IBTA, NVIDIA's NVLink page, AMD's data sheets); hop times are the ones NCCL
itself plans with (`src/graph/tuning.cc`, ring, "simple" protocol: NVLink 3.4, PCI 5.7, network 14 µs; 8.4 µs a call);
shares follow public nccl-tests figures (A100 NVLink 230-250 of 300 GB/s; eight H100 on PCIe 5: 35-45 of 63).
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["fabric", "pcie", "network"]
CALL_US = 8.4
"""Fixed time of starting one collective, by NCCL's estimate."""
HOP_US: dict[Kind, float] = {"fabric": 3.4, "pcie": 5.7, "network": 14.0}
COLLECTIVE_SHARE: dict[Kind, float] = {"fabric": 0.8, "pcie": 0.6, "network": 0.8}
COPY_SHARE = 55 / 63
"""A pinned copy between an H200 and its host, as a share of the PCIe 5 rate."""


@dataclass(frozen=True)
class Link:
    """One kind of connection; `per_node`: one for all accelerators of a node."""

    name: str
    kind: Kind
    gb_s: float
    per_node: bool = False

    @property
    def collective_bytes_s(self) -> float:
        """Bytes per second, one way, that a collective moves through it."""
        return self.gb_s * 1e9 * COLLECTIVE_SHARE[self.kind]

    @property
    def copy_bytes_s(self) -> float:
        """Bytes per second, one way, of a plain pinned copy."""
        return self.gb_s * 1e9 * COPY_SHARE

    @property
    def hop_s(self) -> float:
        """Latency of one step of a ring, in seconds."""
        return HOP_US[self.kind] * 1e-6


LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        Link("nvlink1", "fabric", 80),
        Link("nvlink2", "fabric", 150),
        Link("nvlink3", "fabric", 300),
        Link("nvlink4", "fabric", 450),
        Link("nvlink5", "fabric", 900),
        Link("nvlink-200", "fabric", 200),
        Link("nvlink-bridge-50", "fabric", 50),
        Link("nvlink-bridge-56", "fabric", 56.25),
        Link("nvlink-bridge-100", "fabric", 100),
        Link("nvlink-bridge-300", "fabric", 300),
        Link("nvlink-c2c", "fabric", 450),
        Link("infinity-fabric-100", "fabric", 100),
        Link("infinity-fabric-200", "fabric", 200),
        Link("infinity-fabric-384", "fabric", 384),
        Link("infinity-fabric-448", "fabric", 448),
        Link("infinity-fabric-538", "fabric", 537.6),
        Link("unified", "fabric", 400),
        Link("pcie3", "pcie", 15.75),
        Link("pcie4", "pcie", 31.5),
        Link("pcie5", "pcie", 63.0),
        Link("edr", "network", 12.5),
        Link("hdr", "network", 25.0),
        Link("ndr", "network", 50.0),
        Link("xdr", "network", 100.0),
        Link("ethernet-10", "network", 1.25, per_node=True),
        Link("ethernet-25", "network", 3.125, per_node=True),
        Link("ethernet-100", "network", 12.5, per_node=True),
        Link("ethernet-200", "network", 25.0, per_node=True),
        Link("ethernet-400", "network", 50.0, per_node=True),
    )
}
NETWORKS = tuple(name for name, link in LINKS.items() if link.kind == "network")
