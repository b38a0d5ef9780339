"""Rows to train on, cut from a TokenStore: a stream in windows, or conversations packed whole.

Every row is a dict of three tensors of `sequence_length`: `tokens` (int64), `labels` (int64, the next token of each,
−100 where it is not counted) and `documents` (int32, the number of each token's document within the row; padding is a
document of its own). Nothing is copied until a row is read.
"""

from bisect import bisect_right

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tightfit.counted import counted
from tightfit.errors import UserError
from tightfit.kernels.loss.linear_cross_entropy import IGNORE
from tightfit.train.data.held_out import StorePart, everything
from tightfit.train.data.packing import best_fit
from tightfit.train.data.shuffling import shuffled
from tightfit.train.data.token_store import TokenStore

Row = dict[str, Tensor]


class PackedText(Dataset[Row]):
    """The documents of `part` as one stream, cut into windows: row i has tokens i·T … (i+1)·T − 1 and labels one later.

    Every token but the first is a label exactly once. With `separate_documents` the first token of each document is no
    label, as its own document does not predict it, and documents are numbered; without, a row is one document.
    """

    def __init__(
        self, store: TokenStore, sequence_length: int, *, part: StorePart | None = None, separate_documents: bool = True
    ) -> None:
        _check_length(sequence_length)
        self.store, self.sequence_length, self.separate_documents = store, sequence_length, separate_documents
        self.spans = (part or everything(store)).spans
        self._span_starts = np.append(0, np.cumsum(self.spans[:, 1] - self.spans[:, 0]))  # in the part's own stream
        self.tokens_total = int(self._span_starts[-1])
        documents = len((part or everything(store)).documents_of(store)) if separate_documents else 1
        if self.tokens_total <= max(documents, 1):
            raise UserError(
                f"{counted(self.tokens_total, 'token')} in {counted(documents, 'document')} leave nothing to predict; "
                "give longer documents"
            )

    def __len__(self) -> int:
        return -(-(self.tokens_total - 1) // self.sequence_length)

    def __getitem__(self, index: int) -> Row:
        _check_index(index, len(self))
        T = self.sequence_length
        tokens, positions = self._read(index * T, min((index + 1) * T + 1, self.tokens_total))
        owners = np.zeros_like(positions)
        if self.separate_documents:
            owners = np.searchsorted(self.store.document_starts, positions, side="right")
        changes = owners[1:] != owners[:-1]
        labels = np.append(np.where(changes, IGNORE, tokens[1:]), IGNORE)
        return _row(tokens[:T], labels[:T], np.append(0, np.cumsum(changes))[:T], T)

    def _read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens start … stop − 1 of the part's stream, and their positions in the store's stream."""
        tokens, positions = [], []
        span = bisect_right(self._span_starts, start) - 1
        while start < stop:
            first = int(self.spans[span, 0]) + start - int(self._span_starts[span])
            count = min(stop, int(self._span_starts[span + 1])) - start
            tokens.append(self.store.slice(first, first + count))
            positions.append(np.arange(first, first + count))
            start, span = start + count, span + 1
        return np.concatenate(tokens).astype(np.int64), np.concatenate(positions)


class PackedChats(Dataset[Row]):
    """Whole conversations, several to a row (or one, without `pack`); only tokens of the assistant are labels.

    A conversation too long for a row is cut, if possible so that answers keep their ends (`fitting_window`), and is
    left out if no answer remains: `truncated` and `dropped` count these, `lost_answer_tokens` the labels they lose.
    The last token of a conversation is only ever a label, so a conversation of T + 1 tokens fits.
    """

    def __init__(
        self,
        store: TokenStore,
        sequence_length: int,
        *,
        seed: int = 0,
        part: StorePart | None = None,
        pack: bool = True,
    ) -> None:
        _check_length(sequence_length)
        assert store.has_masks, "these are not conversations"
        self.store, self.sequence_length = store, sequence_length
        self.candidates = candidates = (part or everything(store)).documents_of(store)
        lengths = np.diff(store.document_starts)[candidates] - 1
        is_long = lengths > sequence_length
        self.windows = {i: fitting_window(store.mask(i), sequence_length + 1) for i in candidates[is_long].tolist()}
        labels = {i: store.mask(i)[first + 1 : stop] for i, (first, stop) in self.windows.items()}
        lost = [i for i, counted in labels.items() if not counted.any()]
        self.conversations, self.dropped, self.truncated = len(candidates), len(lost), int(is_long.sum()) - len(lost)
        self.lost_answer_tokens = sum(int(store.mask(i).sum() - counted.sum()) for i, counted in labels.items())
        kept = ~np.isin(candidates, lost)
        lengths[is_long] = [stop - first - 1 for first, stop in self.windows.values()]
        self.rows = self._packed(candidates[kept], lengths[kept], seed, pack)
        if not self.rows:
            raise UserError(
                f"none of the {len(candidates)} conversations has an answer within {sequence_length} tokens; "
                "raise sequence_length"
            )

    @property
    def answer_tokens(self) -> int:
        """Tokens of the assistant in all conversations of this part, those left out included."""
        return sum(int(self.store.mask(i).sum()) for i in self.candidates.tolist())

    def _packed(self, conversations: np.ndarray, lengths: np.ndarray, seed: int, pack: bool) -> list[list[int]]:
        if not pack:
            return [[i] for i in conversations.tolist()]
        # Best fit takes equal lengths in the order given, so the seed decides which of them share a row.
        order = shuffled(len(conversations), seed, "packing")
        rows = best_fit(lengths[order].tolist(), self.sequence_length)
        return [conversations[order[row]].tolist() for row in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        _check_index(index, len(self))
        T = self.sequence_length
        tokens, labels, documents = [], [], []
        for number, conversation in enumerate(self.rows[index]):
            first, stop = self.windows.get(conversation, (0, T + 1))
            said = self.store.document(conversation)[first:stop].astype(np.int64)
            counts = self.store.mask(conversation)[first + 1 : stop]
            tokens.append(said[:-1])
            labels.append(np.where(counts, said[1:], IGNORE))
            documents.append(np.full(len(said) - 1, number))
        return _row(np.concatenate(tokens), np.concatenate(labels), np.concatenate(documents), T)


def fitting_window(mask: np.ndarray, size: int) -> tuple[int, int]:
    """The `size` tokens [first, stop) that are kept of a longer conversation.

    Candidates are windows that end with an answer which they contain whole; the one with the most answer tokens wins.
    Where it has less than half as many as the beginning of the conversation (if the first answer comes late, a window
    around its beginning), that is taken instead.
    """
    counted = np.append(0, np.cumsum(mask))
    starts = np.flatnonzero(mask & ~np.append(False, mask[:-1]))
    ends = np.flatnonzero(mask & ~np.append(mask[1:], False)) + 1
    firsts = np.maximum(ends - size, 0)
    kept = np.where(firsts < np.maximum(starts, 1), counted[ends] - counted[firsts + 1], 0)
    begin = min(max(0, int(starts[0]) - size // 2), len(mask) - size) if len(starts) else 0
    if not len(kept) or 2 * kept.max() < counted[begin + size] - counted[begin + 1]:
        return begin, begin + size
    best = int(kept.argmax())
    return int(firsts[best]), int(ends[best])


def _row(tokens: np.ndarray, labels: np.ndarray, documents: np.ndarray, length: int) -> Row:
    """A row padded to `length` with token 0, without labels, in a document of its own."""
    padding = (0, length - len(tokens))
    return {
        "tokens": torch.from_numpy(np.pad(tokens, padding)),
        "labels": torch.from_numpy(np.pad(labels, padding, constant_values=IGNORE)),
        "documents": torch.from_numpy(np.pad(documents, padding, constant_values=documents[-1] + 1).astype(np.int32)),
    }


def _check_length(sequence_length: int) -> None:
    if sequence_length < 2:
        raise UserError(f"sequence_length is {sequence_length}; it must be at least 2")


def _check_index(index: int, rows: int) -> None:
    if not 0 <= index < rows:
        raise IndexError(f"row {index} of {rows}")
