"""Who sees whom, said once per forward and shared by all layers, in every form a backend of attention asks for.

Query i sees the keys of one interval, [first_i, i]. `bounds` gives our kernel the documents' starts and ends; `mask`
gives SDPA and the reference a dense matrix, O(T²) bytes, where causality alone does not say it all; `block_mask` gives
FlexAttention the 128 × 128 blocks that are seen in part or in full. Each is made when first asked for and kept, one per
window size. A document is a run of equal numbers: the same number later is another document, as positions restart.
"""

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.errors import UserError

FLEX_BLOCK = 128


class Visibility:
    """Query i of the last `queries` of `keys` positions sees keys up to its own, in its window and its document."""

    def __init__(self, queries: int, keys: int, device: torch.device, documents: Tensor | None = None) -> None:
        if documents is not None and queries != keys:
            raise UserError("packed documents and a key/value cache do not go together: documents would be cut")
        self.queries, self.keys, self.device, self.documents = queries, keys, device, documents
        self._masks: dict[int | None, Tensor] = {}
        self._block_masks: dict[int | None, Any] = {}

    @property
    def is_square(self) -> bool:
        """Whether every key is also a query (no cache before them)."""
        return self.queries == self.keys

    def narrowing(self, window: int | None) -> int | None:
        """The window, where it hides anything."""
        return None if window is None or window >= self.keys else window

    def is_plain(self, window: int | None) -> bool:
        """Whether causality alone says who sees whom, all keys being queries."""
        return self.is_square and self.documents is None and self.narrowing(window) is None

    @cached_property
    def bounds(self) -> Tensor | None:
        """Where the document of every token starts and ends, int32 [2, B, T]; None for single documents."""
        if self.documents is None:
            return None
        index = torch.arange(self.keys, device=self.device)
        begins = F.pad(self.documents[:, 1:] != self.documents[:, :-1], (1, 0), value=True)
        starts = torch.where(begins, index, 0).cummax(dim=1).values
        next_starts = F.pad(torch.where(begins, index, self.keys)[:, 1:], (0, 1), value=self.keys)
        ends = next_starts.flip(1).cummin(dim=1).values.flip(1)
        return torch.stack([starts, ends]).int()

    def first(self, window: int | None) -> Tensor:
        """The first key each query sees, [B or 1, queries]."""
        position = torch.arange(self.keys - self.queries, self.keys, device=self.device)[None]
        first = torch.zeros_like(position) if self.bounds is None else self.bounds[0].long()
        return first if window is None else torch.maximum(first, position - window + 1)

    def mask(self, window: int | None, *, explicit: bool = False) -> Tensor | None:
        """True where a query sees a key, [B or 1, 1, queries, keys].

        None when all keys are seen, and, unless `explicit`, when causality alone decides.
        """
        window = self.narrowing(window)
        implied = self.queries == 1 or (self.is_square and not explicit)
        if window is None and self.documents is None and implied:
            return None
        if window not in self._masks:
            key = torch.arange(self.keys, device=self.device)
            query = key[self.keys - self.queries :, None]
            self._masks[window] = ((key <= query) & (key >= self.first(window)[:, :, None]))[:, None]
        return self._masks[window]

    def block_mask(self, window: int | None) -> Any:
        """FlexAttention's BlockMask of a square visibility, from intervals; torch's way makes a dense mask."""
        window = self.narrowing(window)
        if window not in self._block_masks:
            self._block_masks[window] = self._make_block_mask(self.first(window))
        return self._block_masks[window]

    def _make_block_mask(self, first: Tensor) -> Any:
        from torch.nn.attention.flex_attention import BlockMask

        assert self.is_square
        T, size = self.keys, FLEX_BLOCK
        block = torch.arange(-(-T // size), device=self.device)
        row = block[:, None]
        lowest = (first[:, block * size] // size)[:, :, None]
        lowest_full = (-(-first[:, (block * size + size - 1).clamp(max=T - 1)] // size))[:, :, None]
        full = (block >= lowest_full) & (block < row)
        partial = (block >= lowest) & (block <= row) & ~full
        shared = first.shape[0] == 1

        def seen(b: Tensor, _: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (k >= (first[0, q] if shared else first[b, q]))

        return BlockMask.from_kv_blocks(
            *_ordered(partial), *_ordered(full), BLOCK_SIZE=size, mask_mod=seen, seq_lengths=(T, T)
        )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Per row of [B, n, n] the number of true entries, and all columns with the true ones first, as [B, 1, …]."""
    order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]


def documents_between(boundaries: Tensor, length: int) -> Tensor:
    """Document numbers [1, length] of a row packed between `boundaries` [0, end of first, …, length] (cu_seqlens)."""
    return torch.bucketize(torch.arange(length, device=boundaries.device), boundaries[1:], right=True)[None].int()
