"""Findings about several GPUs: software, cards and topology before they communicate, and slow links after."""

import os
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from tightfit.errors import UserError
from tightfit.hardware.collective_rates import RING, CollectiveRates
from tightfit.hardware.local import local_machine
from tightfit.hardware.topology import Topology, read_topology

LEAST_FREE = 0.9
"""Free share of a card's memory below which another program must be using it."""
LEAST_SHARED_BYTES = 2**30
"""The least free size of /dev/shm, through which NCCL copies where cards have no peer access."""
LEAST_RATE = 0.5
"""A link is slow below this share of its expected rate, or of the median rate of all pairs."""
DISABLING = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")


@dataclass(frozen=True)
class Finding:
    """One line of a diagnosis."""

    what: str
    verdict: Literal["fine", "note", "wrong"]
    words: str


def machine_findings(gpus: int) -> list[Finding]:
    """Findings on software, cards, topology and shared memory of `gpus` GPUs; with 0, on the software alone."""
    versions = f"torch {torch.__version__}"
    if not gpus:
        return [Finding("software", "fine", f"{versions}, gloo on the CPU: speeds are not judged")]
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    found = [Finding("software", "fine", f"{versions}, CUDA {torch.version.cuda}, NCCL {nccl}")]
    found += [
        Finding("NCCL", "note", f"{name} is set to {os.environ[name]}") for name in DISABLING if name in os.environ
    ]
    return [*found, *_cards(gpus), *_reach(gpus, read_topology()), *shared_memory(_shared_bytes())]


def _cards(gpus: int) -> list[Finding]:
    names = {torch.cuda.get_device_name(gpu) for gpu in range(gpus)}
    if len(names) > 1:
        return [
            Finding("cards", "note", f"of {len(names)} kinds, the slowest sets the pace: {', '.join(sorted(names))}")
        ]
    free = {gpu: torch.cuda.mem_get_info(gpu) for gpu in range(gpus)}
    busy = [gpu for gpu, (left, total) in free.items() if left < LEAST_FREE * total]
    if busy:
        return [Finding("cards", "note", f"GPU {', '.join(map(str, busy))} has memory in use by other programs")]
    return [Finding("cards", "fine", f"{gpus} × {names.pop()}, all free")]


def _reach(gpus: int, topology: Topology | None) -> list[Finding]:
    pairs = [(one, other) for one in range(gpus) for other in range(gpus) if one != other]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    words = topology.sentence() if topology else "nvidia-smi does not say how GPUs are joined"
    found = [Finding("topology", "fine" if topology else "note", words)]
    if apart:
        named = ", ".join(f"{one}-{other}" for one, other in apart[:4] if one < other)
        found.append(
            Finding("peer access", "note", f"off for {len(apart) // 2} pairs ({named}): NCCL copies through the host")
        )
    return found


def shared_memory(free_bytes: int | None) -> list[Finding]:
    """A finding where /dev/shm is too small, with which NCCL fails at its first collective."""
    if free_bytes is None or free_bytes >= LEAST_SHARED_BYTES:
        return []
    words = f"/dev/shm has {free_bytes / 2**20:,.0f} MiB free; in a container give it more (--shm-size=8g)"
    return [Finding("shared memory", "wrong", words)]


def _shared_bytes(folder: Path = Path("/dev/shm")) -> int | None:
    return shutil.disk_usage(folder).free if folder.is_dir() else None


def slow_links(
    rates: CollectiveRates, pairs: dict[tuple[int, int], float], expected_bytes_s: float | None = None
) -> list[str]:
    """A sentence for each pair that is slower than the others, and one if the collectives are slower than the link."""
    middle = statistics.median(pairs.values())
    found = [
        f"GPUs {one} and {other} exchange {rate:,.1f} GB/s, other pairs {middle:,.1f}; look at their link with "
        "nvidia-smi topo -m"
        for (one, other), rate in pairs.items()
        if rate < LEAST_RATE * middle
    ]
    try:
        expected = local_machine().intra.collective_bytes_s if expected_bytes_s is None else expected_bytes_s
    except UserError:  # a mixture of cards, or none that the catalog has
        return found
    slowest = min(RING, key=rates.wire_bytes_s)
    if rates.wire_bytes_s(slowest) < LEAST_RATE * expected:
        found.append(
            f"{slowest} reaches {rates.wire_bytes_s(slowest) / 1e9:,.1f} GB/s of {expected / 1e9:,.0f} expected of "
            "this link; set NCCL_DEBUG=INFO to see which transport NCCL takes"
        )
    return found
