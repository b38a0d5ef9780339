"""The tensors of one step: all its tokens in one row, and where each one's keys and values go in the cache.

Sequences that add one token come first (their attention is one batched operation over block tables), then pieces of
prompts and guesses to be checked, equal lengths together. Within the row nothing is padded.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from tightfit.kernels.attention.attention_mask import AttentionMask
from tightfit.kernels.decoding.paged_prefill import Rows, query_tiles
from tightfit.serve.schedule.device import to_device
from tightfit.serve.schedule.scheduler import Chunk


@dataclass(frozen=True)
class Piece:
    """`count` tokens from row `first_row` of the step on; their sequence has `before` positions in the cache."""

    first_row: int
    count: int
    before: int
    blocks: list[int]

    @property
    def end(self) -> int:
        """The sequence's length after it."""
        return self.before + self.count


@dataclass(kw_only=True)
class Step:
    """The N tokens of a step; the first `decode_tokens` are single tokens of as many sequences: decoding."""

    tokens: Tensor
    """[1, N]"""
    positions: Tensor
    """[1, N]"""
    slots: Tensor
    """Where each token's keys and values go: block · block size + place in it, [N]."""
    decode_tokens: int
    tables: Tensor
    """Block numbers of the first `decode_tokens` sequences, [decode_tokens, most blocks], padded with 0."""
    lengths: Tensor
    """How many positions each of them sees, [decode_tokens]."""
    longest: int = 0
    """The largest of `lengths`."""
    pieces: list[Piece] = field(default_factory=list)
    rope_lengths: list[tuple[int, int]] = field(default_factory=list)
    """Runs of (tokens, length of their sequence), for ropes that depend on that."""
    rows: Tensor
    """The tokens whose logits are wanted, [R]."""
    block_size: int
    adapters: dict[str, Tensor] = field(default_factory=dict)
    """Rows of tokens by the LoRA adapter they use."""
    adapter_of: Tensor | None = None
    """The number of each token's adapter, −1 for none, in captured steps, [N]."""
    row_by_row: bool = False
    """Whether every token attends by itself (forward/row_tiles.py): all tokens but padding are singles, and a sequence
    may have several."""
    pages: Tensor | None = None
    """Of a step `through` pages: the page of each block, which tables and slots name instead of blocks."""
    _tiles: Tensor | None = None
    _through: "Step | None" = None

    def through(self, pages: Tensor) -> "Step":
        """This step with the page pages[b] in place of each block b; made once for all layers."""
        if self._through is None:
            block = self.slots // self.block_size
            moved = (pages.index_select(0, block) - block) * self.block_size
            self._through = replace(self, tables=_paged(self.tables, pages), slots=self.slots + moved, pages=pages)
            self._through.__dict__["masks"] = self.masks
        return self._through

    @cached_property
    def masks(self) -> list[AttentionMask]:
        """The attention mask of each piece; shared by all layers."""
        return [AttentionMask(piece.count, piece.end, self.tokens.device) for piece in self.pieces]

    @cached_property
    def groups(self) -> list[range]:
        """Pieces whose attention is one operation: neighbours of one length with nothing before them."""
        groups: list[range] = []
        for index, piece in enumerate(self.pieces):
            last = self.pieces[groups[-1].start] if groups else None
            if last is not None and last.count == piece.count and last.before == piece.before == 0:
                groups[-1] = range(groups[-1].start, index + 1)
            else:
                groups.append(range(index, index + 1))
        return groups

    def rows_of(self, group: range) -> slice:
        """The rows of the step that the pieces of a group have."""
        first = self.pieces[group.start]
        return slice(first.first_row, first.first_row + len(group) * first.count)

    @cached_property
    def runs(self) -> list[tuple[Tensor, list[int]]]:
        """With `row_by_row`: for each run of tokens of one sequence its blocks [1, n], and how many keys each sees."""
        tables, counts = torch.unique_consecutive(self.tables[: self.decode_tokens], dim=0, return_counts=True)
        lengths = self.lengths[: self.decode_tokens].split(counts.tolist())
        return [(table[None], own.tolist()) for table, own in zip(tables, lengths, strict=True)]

    @cached_property
    def piece_tables(self) -> list[Tensor]:
        """The blocks of each piece's sequence, [1, blocks]."""
        tables = [to_device([piece.blocks], self.tokens.device) for piece in self.pieces]
        return tables if self.pages is None else [_paged(table, self.pages) for table in tables]

    @cached_property
    def joint_tables(self) -> Tensor:
        """The blocks of all pieces' sequences, int32 [pieces, most blocks], padded with 0."""
        tables = _padded([piece.blocks for piece in self.pieces], self.tokens.device)
        return tables if self.pages is None else _paged(tables, self.pages)

    def tiles(self, rows: int) -> Tensor:
        """The pieces cut into tiles of `rows` queries, int32 [tiles, 4]; made once for all layers."""
        if self._tiles is None:
            pieces = [Rows(piece.first_row, piece.count, piece.before) for piece in self.pieces]
            self._tiles = to_device(query_tiles(pieces, rows), self.tokens.device, torch.int32)
        return self._tiles

    @cached_property
    def _masks(self) -> dict[int | None, Tensor | None]:
        return {}

    @cached_property
    def _biases(self) -> dict[int | None, Tensor | None]:
        return {}

    def single_mask(self, window: int | None) -> Tensor | None:
        """Which positions of its padded blocks each single token sees, [decode_tokens, 1, 1, keys]; None for all."""
        if window not in self._masks:
            position = torch.arange(self.longest, device=self.tokens.device)
            seen = position < self.lengths[:, None]
            if window is not None:
                seen &= position >= self.lengths[:, None] - window
            needed = self.decode_tokens > 1 or (window is not None and window < self.longest)
            self._masks[window] = seen[:, None, None] if needed else None
        return self._masks[window]

    @cached_property
    def flat_tables(self) -> Tensor:
        """The blocks of the single tokens' sequences up to the longest, one table after the other."""
        return self.tables[:, : -(-self.longest // self.block_size)].flatten()

    def single_bias(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """`single_mask` as a bias on scores, 0 or −∞; made once for all layers."""
        if window not in self._biases:
            mask = self.single_mask(window)
            self._biases[window] = (
                None if mask is None else torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
            )
        return self._biases[window]


def ordered(chunks: Items[Chunk]) -> list[Chunk]:
    """`chunks` in the order a step has them."""
    return sorted(chunks, key=_sort_key)


def _sort_key(chunk: Chunk) -> tuple[int, bool]:
    """Singles first, then by length, those that begin at position 0 together."""
    return (0, False) if _is_single(chunk) else (chunk.count + len(chunk.proposal), chunk.start > 0)


def make_step(chunks: Items[Chunk], block_size: int, device: torch.device) -> Step:
    """The tensors of `chunks`, which are `ordered`. Logits are wanted where a token is chosen or a guess checked."""
    tokens: list[int] = []
    positions: list[np.ndarray] = []
    slots: list[np.ndarray] = []
    rows: list[int] = []
    pieces: list[Piece] = []
    runs: list[tuple[int, int]] = []
    singles = [chunk for chunk in chunks if _is_single(chunk)]
    for chunk in chunks:
        own, guesses = chunk.sequence, chunk.proposal
        first_row, end = len(tokens), chunk.end + len(guesses)
        known = own.tokens[chunk.start : chunk.end]
        tokens += known + [0] * (chunk.count - len(known)) + guesses  # 0 where only the device knows it yet
        at_positions = np.arange(chunk.start, end)
        blocks = np.array(own.blocks)[at_positions // block_size]
        positions.append(at_positions)
        slots.append(blocks * block_size + at_positions % block_size)
        runs.append((end - chunk.start, own.length))
        if not _is_single(chunk):
            pieces.append(Piece(first_row, end - chunk.start, chunk.start, own.blocks))
        if chunk.chooses:
            rows += range(first_row + chunk.count - 1, len(tokens))
    lengths = [chunk.end + len(chunk.proposal) for chunk in singles]
    return Step(
        tokens=to_device([tokens], device),
        positions=to_device(np.concatenate(positions)[None], device),
        slots=to_device(np.concatenate(slots), device),
        decode_tokens=len(singles),
        tables=_padded([chunk.sequence.blocks for chunk in singles], device),
        lengths=to_device(lengths, device, torch.int32),
        longest=max(lengths, default=0),
        pieces=pieces,
        rope_lengths=runs,
        rows=to_device(rows, device, torch.int64),
        block_size=block_size,
        adapters=_adapter_rows(chunks, device),
    )


def _adapter_rows(chunks: Items[Chunk], device: torch.device) -> dict[str, Tensor]:
    rows: dict[str, list[int]] = {}
    first_row = 0
    for chunk in chunks:
        count = chunk.count + len(chunk.proposal)
        if chunk.sequence.adapter is not None:
            rows.setdefault(chunk.sequence.adapter, []).extend(range(first_row, first_row + count))
        first_row += count
    return {adapter: to_device(own, device) for adapter, own in rows.items()}


def _padded(tables: list[list[int]], device: torch.device) -> Tensor:
    """Block tables as int32 [tables, most blocks], padded with 0."""
    most = max(map(len, tables), default=0)
    rows = np.zeros((len(tables), most), dtype=np.int32)
    for row, table in zip(rows, tables, strict=True):
        row[: len(table)] = table
    return to_device(rows, device)


def _paged(tables: Tensor, pages: Tensor) -> Tensor:
    return pages.index_select(0, tables.flatten()).view(tables.shape)


def _is_single(chunk: Chunk) -> bool:
    return chunk.count + len(chunk.proposal) == 1
