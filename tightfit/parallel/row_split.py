"""RowSplit: which tokens of every row a context rank has.

Ranks that exchange heads have consecutive tokens. In a ring, consecutive tokens would leave the first ranks little work
in causal attention, so rows are cut into two pieces per ring rank and dealt out from both ends (zigzag): ring rank i of
r has pieces i and 2r − 1 − i, and as many pairs of queries and keys as every other. Where both are used, the ranks that
exchange heads share their ring rank's two pieces, in order.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RowSplit:
    """A context rank: its place in the ring and, inside it, among the ranks that exchange heads."""

    ring: int = 1
    ring_rank: int = 0
    ulysses_ranks: int = 1
    ulysses_rank: int = 0

    @property
    def ranks(self) -> int:
        """All context ranks."""
        return self.ring * self.ulysses_ranks

    def ring_intervals(self, length: int) -> list[tuple[int, int]]:
        """Begin and end of the pieces that this rank's place in the ring has of a row of `length` tokens."""
        if self.ring == 1:
            return [(0, length)]
        piece, last = length // (2 * self.ring), 2 * self.ring - 1
        return [(each * piece, (each + 1) * piece) for each in (self.ring_rank, last - self.ring_rank)]

    def intervals(self, length: int) -> list[tuple[int, int]]:
        """Begin and end of the tokens that this rank has of a row of `length` tokens."""
        own = length // self.ranks
        first, found, offset = self.ulysses_rank * own, [], 0
        for begin, end in self.ring_intervals(length):
            low, high = max(first, offset), min(first + own, offset + end - begin)
            if low < high:
                found.append((begin + low - offset, begin + high - offset))
            offset += end - begin
        return found

    def cut(self, rows: Tensor) -> Tensor:
        """This rank's tokens of `rows` [B, T]."""
        pieces = [rows[:, begin:end] for begin, end in self.intervals(rows.shape[1])]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
