"""Groups of ranks: how long a collective takes, from the links it crosses.

Ranks are numbered with tensor innermost, then context, data, and pipeline outermost (the order of torchtitan's mesh
and of Megatron). A group whose members lie in one node uses the links inside it. One that spans nodes moves what its
members inside a node have of network cards together, but never more than the links inside carry: rings run over all
cards at once. Ring collectives wait one hop per member, trees two per doubling; all-reduce takes the better of both
(Thakur et al. 2005; NCCL's own tuning table). Nothing here knows about contention between groups of different axes.
"""

import math
from collections.abc import Callable

from tightfit.hardware.links import CALL_US
from tightfit.hardware.machine import Machine

CALL_S = CALL_US * 1e-6
LOSS_PER_DOUBLING, LEAST_SHARE = 0.05, 0.5
"""Of the network's bandwidth, for each doubling of the nodes a group spans: its rings share more switches with others.
From published runs of 2 to 64 nodes (benchmarks/published.py)."""


class Group:
    """`size` ranks that lie `stride` apart."""

    def __init__(self, machine: Machine, stride: int, size: int) -> None:
        """Of `machine`."""
        peers, network = machine.peers, machine.inter
        self.size = size
        self.local = size if stride * size <= machine.per_node else min(size, max(1, machine.per_node // stride))
        """Of them in one node."""
        nodes = math.ceil(size / self.local)
        self.intra_bytes_s = peers.pair_bytes_s
        self.inter_bytes_s = network.collective_bytes_s / (machine.per_node if network.per_node else 1)
        self.inter_bytes_s *= max(LEAST_SHARE, 1 - LOSS_PER_DOUBLING * math.log2(nodes))
        inside_bytes_s = peers.ring_bytes_s if self.local > 1 else math.inf
        across_bytes_s = min(inside_bytes_s, self.inter_bytes_s * self.local)
        self.ring_bytes_s = peers.ring_bytes_s if nodes == 1 else across_bytes_s
        """Bandwidth of a ring through them, per rank."""
        far_hops = nodes if nodes > 1 else 0
        self.hop_s = far_hops * network.hop_s + (size - nodes) * peers.hop_s if size > 1 else 0.0
        """All hops of one trip round the ring."""
        self.far_s = network.hop_s if nodes > 1 else peers.hop_s
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
