"""The ring of context ranks: what it costs a layer that attention does not hide.

Each of c ranks keeps its queries and sees everybody's keys and values, which go round the ring in c − 1 sends, the
first while the rank attends to its own (Liu et al. 2023). So they hide behind all but one c-th of attention, and slow
what they hide behind. Backward sends keys and values with their gradients. What arrives is attended to apart, and its
result merged: outputs forward, gradients of queries, keys and values backward, into float32 sums. As rows are dealt out
from both ends, half of the arriving pieces concern only the later half of the queries, the others only the earlier half
of the keys: three quarters of a merge on average. Not counted: attention to short pieces is less efficient.
"""

from dataclasses import dataclass

from tightfit.plan.seconds.overlap import with_contention_s

MERGE_BYTES = 2 * 4 + 2
"""Of a number that is merged: the sum read and written in float32, and the addend in 16 bits."""
MERGED_SHARE = 3 / 4


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Of one layer and micro-batch."""

    ranks: int
    send_s: float
    """Keys and values, to the next rank."""
    query_numbers: float
    key_numbers: float
    """Of keys and values together."""
    bytes_s: float

    def forward_s(self, attention_s: float) -> float:
        """Beside attention forward."""
        return self._sent_s(1, attention_s) + self._merged_s(self.query_numbers)

    def backward_s(self, attention_s: float) -> float:
        """Beside attention backward."""
        return self._sent_s(2, attention_s) + self._merged_s(self.query_numbers + self.key_numbers)

    def _sent_s(self, payloads: int, attention_s: float) -> float:
        traffic_s = (self.ranks - 1) * payloads * self.send_s
        hiding_s = attention_s * (self.ranks - 1) / self.ranks
        return with_contention_s(traffic_s, max(0.0, traffic_s - hiding_s))

    def _merged_s(self, numbers: float) -> float:
        return (self.ranks - 1) * MERGED_SHARE * numbers * MERGE_BYTES / self.bytes_s
