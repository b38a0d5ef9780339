"""How fast collectives run between the ranks of this machine, as `tightfit doctor` measured them.

A measured time is split in two: t(payload) = latency + wire bytes / rate, where the latency is the shortest of all
times (a small payload that took longer was disturbed) and the rate follows from the largest payload. Wire bytes are
those that a rank sends in the best algorithm (Thakur et al. 2005), for N ranks and S bytes of payload (what each rank
holds at the end; of a sum, at the beginning):

    all-reduce 2 S (N−1)/N    all-gather, reduce-scatter, all-to-all S (N−1)/N    send S

Limits: one node, all of its ranks in one group. Smaller groups are planned with the same rate per rank.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tightfit.hardware.links import CALL_US, Link

RING = ("all-reduce", "all-gather", "reduce-scatter")
PAIRWISE = ("all-to-all", "send")
OPERATIONS = (*RING, *PAIRWISE)


@dataclass(frozen=True, kw_only=True)
class PeerRates:
    """Rates of collectives inside a node that a plan uses, per rank and in one direction."""

    ring_bytes_s: float
    """Wire bytes a second of all-reduce, all-gather and reduce-scatter."""
    pair_bytes_s: float
    """Wire bytes a second of all-to-all and send."""
    hop_s: float
    """Latency of one step of a ring."""

    @classmethod
    def of_link(cls, link: Link) -> "PeerRates":
        """The expected rates of a link that was not measured."""
        rate = link.collective_bytes_s
        return cls(ring_bytes_s=rate, pair_bytes_s=rate, hop_s=link.hop_s)


@dataclass(frozen=True, kw_only=True)
class CollectivePoint:
    """The time of one operation on `payload_bytes`."""

    operation: str
    payload_bytes: int
    us: float


@dataclass(frozen=True, kw_only=True)
class CollectiveRates:
    """All measurements of `ranks` ranks over `backend`."""

    ranks: int
    backend: str
    points: tuple[CollectivePoint, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "CollectiveRates":
        """The rates from `to_json`'s data."""
        return cls(**{**data, "points": tuple(CollectivePoint(**point) for point in data["points"])})

    def of(self, operation: str) -> list[CollectivePoint]:
        """The measurements of `operation`, smallest payload first."""
        return sorted(
            (point for point in self.points if point.operation == operation), key=lambda point: point.payload_bytes
        )

    def latency_us(self, operation: str) -> float:
        """Latency: the shortest time of any payload."""
        return min(point.us for point in self.of(operation))

    def wire_bytes_s(self, operation: str) -> float:
        """Bytes a second that a rank sends, beyond the latency, at the largest payload."""
        first, *_, last = self.of(operation)
        more_bytes = wire_share(operation, self.ranks) * (last.payload_bytes - first.payload_bytes)
        sending_us = max(last.us - self.latency_us(operation), last.us / 2)  # at most half of a large one is latency
        return more_bytes / (sending_us * 1e-6)

    def peer_rates(self) -> PeerRates:
        """Rates of the slowest operation of each kind, and the all-gather's latency per hop (N − 1 hops)."""
        hops = max(1, self.ranks - 1)
        return PeerRates(
            ring_bytes_s=min(self.wire_bytes_s(operation) for operation in RING),
            pair_bytes_s=min(self.wire_bytes_s(operation) for operation in PAIRWISE),
            hop_s=max(0.0, self.latency_us("all-gather") - CALL_US) * 1e-6 / hops,
        )


def wire_share(operation: str, ranks: int) -> float:
    """Bytes that a rank sends for each byte of payload."""
    away = (ranks - 1) / ranks
    return {"all-reduce": 2 * away, "send": 1.0}.get(operation, away)
