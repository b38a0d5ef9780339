"""Which link joins each pair of GPUs, from `nvidia-smi topo -m`; without torch."""

import re
import subprocess
from dataclasses import dataclass

COMMAND = ["nvidia-smi", "topo", "-m"]
MEANINGS = {
    "NV": "NVLink",
    "PIX": "one PCIe bridge",
    "PXB": "several PCIe bridges",
    "PHB": "the CPU's PCIe host bridge",
    "NODE": "PCIe host bridges of one NUMA node",
    "SYS": "the link between CPU sockets",
}
_TERMINAL = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Topology:
    """The kind of link of every pair of GPUs: `NV18`, `PIX`, `SYS`, …"""

    links: dict[tuple[int, int], str]

    def kinds(self) -> dict[str, int]:
        """How many pairs each kind of link joins."""
        found = [kind for (one, other), kind in sorted(self.links.items()) if one < other]
        return {kind: found.count(kind) for kind in dict.fromkeys(found)}

    def sentence(self) -> str:
        """The kinds in words."""
        return "; ".join(f"{count} pairs over {kind} ({meaning(kind)})" for kind, count in self.kinds().items())


def meaning(kind: str) -> str:
    """A kind of link in words."""
    return MEANINGS.get("NV" if kind.startswith("NV") else kind, "unknown")


def read_topology(text: str | None = None) -> Topology | None:
    """The topology from nvidia-smi (or from `text` in its format); None where nvidia-smi does not give one."""
    if text is None:
        try:
            text = subprocess.run(COMMAND, capture_output=True, text=True, check=True, timeout=20).stdout
        except (OSError, subprocess.SubprocessError):
            return None
    rows = [_TERMINAL.sub("", line).split() for line in text.splitlines()]
    header = next((row for row in rows if row and row[0] == "GPU0"), None)
    if header is None:
        return None
    gpus = [name for name in header if re.fullmatch(r"GPU\d+", name)]
    links: dict[tuple[int, int], str] = {}
    for row in rows[rows.index(header) + 1 :]:
        if row and re.fullmatch(r"GPU\d+", row[0]):
            own = int(row[0][3:])
            links |= {(own, int(gpu[3:])): kind for gpu, kind in zip(gpus, row[1:], strict=False) if kind != "X"}
    return Topology(links) if links else None
