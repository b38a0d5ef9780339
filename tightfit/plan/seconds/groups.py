"""Groups of ranks: how long a collective takes, from the links it crosses.

Ranks are numbered with tensor innermost, then context, data, and pipeline outermost (the order of torchtitan's mesh
and of Megatron). A group within one node uses the links inside it. A group that spans nodes has the bandwidth of all
network cards of its members in a node, as NCCL runs a ring over each card, but not more than the links inside a node.
Ring collectives have the latency of one hop per member, trees of two per doubling; all-reduce takes the faster of both
(Thakur et al. 2005; NCCL's own tuning table). Not modelled: contention between groups of different axes.
"""

import math

from tightfit.hardware.links import CALL_US
from tightfit.hardware.machine import Machine

CALL_S = CALL_US * 1e-6
LOSS_PER_DOUBLING, LEAST_SHARE = 0.05, 0.5
"""Share of the network's bandwidth lost at each doubling of a group's nodes, as rings share switches with others, and
the least share that is left. From published runs of 2 to 64 nodes (benchmarks/published.py)."""


class Group:
    """`size` ranks that lie `stride` apart."""

    def __init__(self, machine: Machine, stride: int, size: int) -> None:
        """Ranks of `machine`."""
        peers, network = machine.peers, machine.inter
        self.size = size
        self.local = size if stride * size <= machine.per_node else min(size, max(1, machine.per_node // stride))
        """Members in one node."""
        nodes = math.ceil(size / self.local)
        self.intra_bytes_s = peers.pair_bytes_s
        self.inter_bytes_s = network.collective_bytes_s / (machine.per_node if network.per_node else 1)
        self.inter_bytes_s *= max(LEAST_SHARE, 1 - LOSS_PER_DOUBLING * math.log2(nodes))
        inside_bytes_s = peers.ring_bytes_s if self.local > 1 else math.inf
        across_bytes_s = min(inside_bytes_s, self.inter_bytes_s * self.local)
        self.ring_bytes_s = peers.ring_bytes_s if nodes == 1 else across_bytes_s
        """Bandwidth of a ring through all members, per rank."""
        far_hops = nodes if nodes > 1 else 0
        self.hop_s = far_hops * network.hop_s + (size - nodes) * peers.hop_s if size > 1 else 0.0
        """Latency of one trip round the ring: all its hops."""
        self.far_s = network.hop_s if nodes > 1 else peers.hop_s
        """The longest single hop."""

    def all_gather_s(self, payload_bytes: float) -> float:
        """All-gather to `payload_bytes` on every rank, S (N−1)/N of them received; reduce-scatter takes as long."""
        if self.size == 1:
            return 0.0
        return CALL_S + self.hop_s + payload_bytes * (self.size - 1) / self.size / self.ring_bytes_s

    def all_reduce_s(self, payload_bytes: float) -> float:
        """All-reduce of `payload_bytes`: the faster of ring, 2 S (N−1)/N bytes, and tree, 2 S bytes but fewer hops."""
        if self.size == 1:
            return 0.0
        ring = 2 * self.hop_s + 2 * payload_bytes * (self.size - 1) / self.size / self.ring_bytes_s
        tree = 2 * math.ceil(math.log2(self.size)) * self.far_s + 2 * payload_bytes / self.ring_bytes_s
        return CALL_S + min(ring, tree)

    def all_to_all_s(self, payload_bytes: float) -> float:
        """All-to-all of `payload_bytes` per rank: one equal part to each rank, its own included."""
        if self.size == 1:
            return 0.0
        near = payload_bytes * (self.local - 1) / self.size / self.intra_bytes_s
        far = payload_bytes * (self.size - self.local) / self.size / self.inter_bytes_s
        return CALL_S + self.far_s + near + far

    def send_s(self, payload_bytes: float) -> float:
        """Every rank sends to its neighbour; where some pair is on two nodes, the network's time counts."""
        if self.size == 1:
            return 0.0
        return self.far_s + payload_bytes / (self.intra_bytes_s if self.local == self.size else self.inter_bytes_s)
