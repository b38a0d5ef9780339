"""Ring: what context ranks cost a layer that attention does not do for free.

Each of c ranks keeps its queries and sees everybody's keys and values, which go round the ring in c − 1 hand-ons, the
first while the rank attends to its own (Liu et al. 2023). So they hide behind all but one c-th of attention, and slow
what they hide behind. Backward hands on keys and values with their gradients. What arrives is attended to apart, and
its result merged: outputs forward, gradients of queries, keys and values backward, into float32 sums. As rows are dealt
out from both ends, half of the arriving pieces concern only the later half of the queries, the others only the earlier
half of the keys: three quarters of a merge on average. Not counted: attention to short pieces is less efficient.
"""

from dataclasses import dataclass

MERGE_BYTES = 2 * 4 + 2
"""Of a number that is merged: the sum read and written in float32, and the addend in 16 bits."""
CONCERNED = 3 / 4


@dataclass(frozen=True)
class Ring:
    """Of one layer and micro-batch: a hand-on's seconds, the numbers one merge takes, and what there is to hide in."""

    ranks: int
    hand_on_s: float
    query_numbers: float
    key_numbers: float
    """Keys and values together."""
    bytes_s: float
    contention: float

    def forward_s(self, attention_s: float) -> float:
        """Beside attention forward."""
        return self._handed_on_s(1, attention_s) + self._merged_s(self.query_numbers)

    def backward_s(self, attention_s: float) -> float:
        """Beside attention backward."""
        return self._handed_on_s(2, attention_s) + self._merged_s(self.query_numbers + self.key_numbers)

    def _handed_on_s(self, payloads: int, attention_s: float) -> float:
        traffic = (self.ranks - 1) * payloads * self.hand_on_s
        exposed = max(0.0, traffic - attention_s * (self.ranks - 1) / self.ranks)
        return exposed + self.contention * (traffic - exposed)

    def _merged_s(self, numbers: float) -> float:
        return (self.ranks - 1) * CONCERNED * numbers * MERGE_BYTES / self.bytes_s
