"""Groups of ranks: how long a collective takes, from the links it crosses.

Ranks are numbered with tensor innermost, then context, data, and pipeline outermost (the order of torchtitan's mesh
and of Megatron). A group whose members lie in one node uses the links inside it. One that spans nodes moves what its
members inside a node have of network cards together, but never more than the links inside carry: rings run over all
cards at once. Ring collectives wait one hop per member, trees two per doubling; all-reduce takes the better of both
(Thakur et al. 2005; NCCL's own tuning table). Nothing here knows about contention between groups of different axes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from tightfit.hardware.links import CALL_US
from tightfit.hardware.machine import Machine

CALL_S = CALL_US * 1e-6
LOSS_PER_DOUBLING, LEAST_SHARE = 0.05, 0.5
"""Of the network's bandwidth, for each doubling of the nodes a group spans: its rings share more switches with others.
From published runs of 2 to 64 nodes (benchmarks/published.py)."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """`size` ranks, `local` of them in one node; `ring_bytes_s` is the bandwidth of a ring through them, per rank."""

    size: int
    local: int
    ring_bytes_s: float
    intra_bytes_s: float
    inter_bytes_s: float
    hop_s: float
    """All hops of one trip round the ring."""
    far_s: float
    """The longest single hop."""

    def all_gather_s(self, payload_bytes: float) -> float:
        """Every rank ends with `payload_bytes`, of which it had its share; reduce-scatter takes as long."""
        if self.size == 1:
            return 0.0
        return CALL_S + self.hop_s + payload_bytes * (self.size - 1) / self.size / self.ring_bytes_s

    def all_reduce_s(self, payload_bytes: float) -> float:
        """Sum of `payload_bytes` on every rank: ring, or tree where that waits less."""
        if self.size == 1:
            return 0.0
        ring = 2 * self.hop_s + 2 * payload_bytes * (self.size - 1) / self.size / self.ring_bytes_s
        tree = 2 * math.ceil(math.log2(self.size)) * self.far_s + 2 * payload_bytes / self.ring_bytes_s
        return CALL_S + min(ring, tree)

    def all_to_all_s(self, payload_bytes: float) -> float:
        """Every rank sends `payload_bytes` away in equal parts, one to each rank and one kept."""
        if self.size == 1:
            return 0.0
        near = payload_bytes * (self.local - 1) / self.size / self.intra_bytes_s
        far = payload_bytes * (self.size - self.local) / self.size / self.inter_bytes_s
        return CALL_S + self.far_s + near + far

    def send_s(self, payload_bytes: float) -> float:
        """One rank to its neighbour; the slower link counts where a step crosses nodes."""
        if self.size == 1:
            return 0.0
        return self.far_s + payload_bytes / (self.intra_bytes_s if self.local == self.size else self.inter_bytes_s)


MakeGroup = Callable[[int, int], Group]
"""From a stride and a size."""


def make_group(machine: Machine, stride: int, size: int) -> Group:
    """The group of `size` ranks that lie `stride` apart."""
    peers, inter = machine.peers, machine.inter.collective_bytes_s
    if machine.inter.per_node:
        inter /= machine.per_node
    local = size if stride * size <= machine.per_node else min(size, max(1, machine.per_node // stride))
    nodes = math.ceil(size / local)
    inter *= max(LEAST_SHARE, 1 - LOSS_PER_DOUBLING * math.log2(nodes))
    inside = peers.ring_bytes_s if local > 1 else math.inf
    bandwidth = peers.ring_bytes_s if nodes == 1 else min(inside, inter * local)
    far_s = machine.inter.hop_s if nodes > 1 else peers.hop_s
    hops = (nodes * machine.inter.hop_s if nodes > 1 else 0.0) + (size - max(nodes, 1)) * peers.hop_s
    return Group(
        size=size,
        local=local,
        ring_bytes_s=bandwidth,
        intra_bytes_s=peers.pair_bytes_s,
        inter_bytes_s=inter,
        hop_s=hops if size > 1 else 0.0,
        far_s=far_s,
    )
