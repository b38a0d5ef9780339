"""Context ranks: what exchanging heads and going round a ring cost a layer that attention does not hide.

Exchange of heads (parallel/head_exchange.py): two all-to-alls, of queries, keys and values and of outputs, which wait
in line, and the copies that sort heads by rank and tokens by row; backward as much.

Ring (parallel/ring.py): each of r ranks keeps its queries and sees everybody's keys and values, which go round in r − 1
sends, the first while the rank attends to its own (Liu et al. 2023). So they hide behind all but one r-th of attention,
and slow what they hide behind. Backward sends keys and values with their gradients in float32. What arrives is attended
to apart, and its result merged: outputs forward, gradients of queries, keys and values backward, into float32 sums. As
rows are dealt out from both ends, half of the arriving pieces concern only the later half of the queries, the others
only the earlier half of the keys: three quarters of a merge on average. Not counted: attention to short pieces is less
efficient.
"""

from dataclasses import dataclass

from tightfit.plan.seconds.overlap import with_contention_s

MERGE_BYTES = 2 * 4 + 2
"""Bytes per number that is merged: the sum read and written in float32, and the addend in 16 bits."""
MERGED_SHARE = 3 / 4


@dataclass(frozen=True, kw_only=True)
class HeadExchange:
    """The exchange of heads in one layer for one micro-batch, one way."""

    sent_s: float
    """The all-to-alls of queries, keys and values, and of outputs."""
    copied_bytes: float
    """Read or written to sort them."""
    bytes_s: float

    @property
    def one_way_s(self) -> float:
        """Forward, and backward as much."""
        return self.sent_s + self.copied_bytes / self.bytes_s


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The ring in one layer for one micro-batch."""

    ranks: int
    send_s: float
    """Keys and values, to the next rank."""
    gradient_send_s: float
    """Their gradients, to the next rank."""
    query_numbers: float
    key_numbers: float
    """Numbers of keys and values together."""
    bytes_s: float

    def forward_s(self, attention_s: float) -> float:
        """Beside attention forward."""
        return self._sent_s(self.send_s, attention_s) + self._merged_s(self.query_numbers)

    def backward_s(self, attention_s: float) -> float:
        """Beside attention backward."""
        return self._sent_s(self.send_s + self.gradient_send_s, attention_s) + self._merged_s(
            self.query_numbers + self.key_numbers
        )

    def _sent_s(self, one_send_s: float, attention_s: float) -> float:
        traffic_s = (self.ranks - 1) * one_send_s
        hiding_s = attention_s * (self.ranks - 1) / self.ranks
        return with_contention_s(traffic_s, max(0.0, traffic_s - hiding_s))

    def _merged_s(self, numbers: float) -> float:
        return (self.ranks - 1) * MERGED_SHARE * numbers * MERGE_BYTES / self.bytes_s
