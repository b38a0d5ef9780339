"""The attention mask of a forward pass, shared by all layers, in the form each attention backend takes.

Query i attends to one interval of keys, [first_i, i]: the end is causality, the start the window or the document.

| form | for | size |
|---|---|---|
| `bounds` | our Triton kernel | start and end of every token's document, int32 [2, B, T] |
| `dense` | SDPA and the eager reference | bool [B, 1, T, T]; None where causality alone is the mask |
| `block_mask` | FlexAttention | which 128 × 128 blocks are attended in part or in full |

Each is built on first use and cached, one per window size. A document is a run of equal ids in `documents`: the same id
further on is another document, as positions restart.
"""

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.errors import UserError

FLEX_BLOCK = 128


class AttentionMask:
    """Causal mask of the last `queries` of `keys` positions, within windows and packed documents."""

    def __init__(self, queries: int, keys: int, device: torch.device, documents: Tensor | None = None) -> None:
        if documents is not None and queries != keys:
            raise UserError("packed documents and a key/value cache do not go together: documents would be cut")
        self.queries, self.keys, self.device, self.documents = queries, keys, device, documents
        self._masks: dict[int | None, Tensor] = {}
        self._firsts: dict[tuple[int | None, int], Tensor] = {}
        self._block_masks: dict[int | None, Any] = {}

    @property
    def is_square(self) -> bool:
        """Whether there are as many queries as keys (no key/value cache)."""
        return self.queries == self.keys

    def effective_window(self, window: int | None) -> int | None:
        """`window`, or None where it covers all keys."""
        return None if window is None or window >= self.keys else window

    def is_causal_only(self, window: int | None) -> bool:
        """Whether the mask is the plain causal triangle: no cache, no documents, no window."""
        return self.is_square and self.documents is None and self.effective_window(window) is None

    @cached_property
    def bounds(self) -> Tensor | None:
        """Start and end of every token's document, int32 [2, B, T]; None without packed documents."""
        if self.documents is None:
            return None
        index = torch.arange(self.keys, device=self.device)
        begins = F.pad(self.documents[:, 1:] != self.documents[:, :-1], (1, 0), value=True)
        starts = torch.where(begins, index, 0).cummax(dim=1).values
        next_starts = F.pad(torch.where(begins, index, self.keys)[:, 1:], (0, 1), value=self.keys)
        ends = next_starts.flip(1).cummin(dim=1).values.flip(1)
        return torch.stack([starts, ends]).int()

    def first(self, window: int | None) -> Tensor:
        """The first key each query attends to, [B or 1, queries]."""
        position = torch.arange(self.keys - self.queries, self.keys, device=self.device)[None]
        first = torch.zeros_like(position) if self.bounds is None else self.bounds[0].long()
        return first if window is None else torch.maximum(first, position - window + 1)

    def first_of_rows(self, window: int | None, rows: int) -> Tensor:
        """The first key of every query of `rows` rows, int32 [rows, queries]; one for all layers with this window."""
        window = self.effective_window(window)
        if (window, rows) not in self._firsts:
            self._firsts[window, rows] = self.first(window).to(torch.int32).expand(rows, -1).contiguous()
        return self._firsts[window, rows]

    def dense(self, window: int | None, *, explicit: bool = False) -> Tensor | None:
        """True where a query attends to a key, [B or 1, 1, queries, keys].

        None where nothing is masked and, unless `explicit`, where the mask is the plain causal triangle.
        """
        window = self.effective_window(window)
        implied = self.queries == 1 or (self.is_square and not explicit)
        if window is None and self.documents is None and implied:
            return None
        if window not in self._masks:
            key = torch.arange(self.keys, device=self.device)
            query = key[self.keys - self.queries :, None]
            self._masks[window] = ((key <= query) & (key >= self.first(window)[:, :, None]))[:, None]
        return self._masks[window]

    def block_mask(self, window: int | None) -> Any:
        """FlexAttention's BlockMask, built from the intervals: torch's `create_block_mask` makes a dense mask first."""
        window = self.effective_window(window)
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

        def attends(b: Tensor, _: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (k >= (first[0, q] if shared else first[b, q]))

        return BlockMask.from_kv_blocks(
            *_ordered(partial), *_ordered(full), BLOCK_SIZE=size, mask_mod=attends, seq_lengths=(T, T)
        )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Per row of [B, n, n] the number of true entries, and all columns with the true ones first, as [B, 1, …]."""
    order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]
