"""The split of a token store into a part to train on and a held-out part to evaluate on.

Whole documents are chosen at random (by seed), so both parts cover the variety of the data and no document is in both.
A single document can only be cut: its last windows are held out.
"""

from dataclasses import dataclass

import numpy as np

from tightfit.errors import UserError
from tightfit.train.data.shuffling import shuffled
from tightfit.train.data.token_store import TokenStore


@dataclass(frozen=True, eq=False)
class StorePart:
    """Ranges of a store's token stream, in order: int64 [ranges, 2], first token and one past the last."""

    spans: np.ndarray

    def documents_of(self, store: TokenStore) -> np.ndarray:
        """The documents that start in this part."""
        starts = store.document_starts[:-1]
        span = np.searchsorted(self.spans[:, 0], starts, side="right") - 1
        return np.flatnonzero((span >= 0) & (starts < self.spans[span, 1]))


def everything(store: TokenStore) -> StorePart:
    """All of `store`."""
    return StorePart(np.array([[0, store.tokens_total]], dtype=np.int64))


def split(store: TokenStore, held_out: float, *, seed: int, sequence_length: int) -> tuple[StorePart, StorePart | None]:
    """The part to train on and, unless `held_out` is 0, the part with that share of the documents."""
    if not 0 <= held_out < 1:
        raise UserError(f"held_out is {held_out}; give a share of at least 0 and below 1")
    if held_out == 0:
        return everything(store), None
    if store.documents == 1:
        return _split_document(store, held_out, sequence_length)
    kept = min(max(1, round(held_out * store.documents)), store.documents - 1)
    order = shuffled(store.documents, seed, "held out")
    return _part(store, order[kept:]), _part(store, order[:kept])


def _part(store: TokenStore, documents: np.ndarray) -> StorePart:
    """The part with these documents; consecutive ones are joined into one range."""
    documents = np.sort(documents)
    breaks = np.flatnonzero(np.diff(documents) != 1)
    first, last = np.append(0, breaks + 1), np.append(breaks, len(documents) - 1)
    starts = store.document_starts
    return StorePart(np.stack([starts[documents[first]], starts[documents[last] + 1]], axis=1))


def _split_document(store: TokenStore, held_out: float, sequence_length: int) -> tuple[StorePart, StorePart]:
    windows = -(-(store.tokens_total - 1) // sequence_length)
    if store.has_masks or windows < 2:
        what = "conversation" if store.has_masks else f"document of {store.tokens_total} tokens"
        raise UserError(
            f"the data is a single {what}, which leaves nothing to hold out at sequence length {sequence_length}; "
            "give more data, name files to evaluate on, or set held_out to 0"
        )
    cut = (windows - min(max(1, round(held_out * windows)), windows - 1)) * sequence_length
    return StorePart(np.array([[0, cut]], dtype=np.int64)), StorePart(
        np.array([[cut, store.tokens_total]], dtype=np.int64)
    )
