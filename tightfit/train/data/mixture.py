"""Several sources of rows in the proportions a user wants.

A pass ends when every row of every source was seen: with shares sᵢ and nᵢ rows it has N = max(nᵢ / sᵢ) rows, of which
source i gives sᵢ · N, repeating its rows where it has fewer. The loader shuffles the pass, so every stretch of a run
has about these proportions, and the loader's state stays one number.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate

from torch.utils.data import Dataset

from tightfit.errors import UserError
from tightfit.train.data.dataset import PackedChats, PackedText, Row
from tightfit.train.data.token_store import TokenStore

MOST_ROWS = 2**31
Rows = PackedText | PackedChats


class Mixture(Dataset[Row]):
    """Rows of `parts`, `weights[i]` of them (relative to the others) from part i."""

    def __init__(self, parts: Sequence[Rows], weights: Sequence[float]) -> None:
        assert len(parts) == len(weights) > 0, "a weight for each part"
        self.parts = list(parts)
        largest = max(weights)  # large numbers may have no finite sum
        total = sum(weight / largest for weight in weights)
        shares = [weight / largest / total for weight in weights]
        rows = max(len(part) / share if share else math.inf for part, share in zip(parts, shares, strict=True))
        if rows > MOST_ROWS:
            raise UserError(
                f"data.weights has {min(weights):g} beside {largest:g}, which makes a pass of {rows:.3g} rows, and the "
                f"most are {MOST_ROWS:,}; raise the smaller one"
            )
        counts = [math.ceil(round(share * rows, 6)) for share in shares]
        self.ends = list(accumulate(counts))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        which = bisect_right(self.ends, index)
        part = self.parts[which]
        return part[(index - (self.ends[which - 1] if which else 0)) % len(part)]


@dataclass(frozen=True)
class Stores:
    """Totals and fingerprint of several token stores."""

    stores: tuple[TokenStore, ...]
    weights: tuple[float, ...]

    @property
    def tokens_total(self) -> int:
        """Tokens of all stores."""
        return sum(store.tokens_total for store in self.stores)

    @property
    def documents(self) -> int:
        """Documents of all stores."""
        return sum(store.documents for store in self.stores)

    @property
    def fingerprint(self) -> str:
        """A digest of the stores' content, their order and their weights."""
        parts = [*(store.fingerprint for store in self.stores), *map(repr, self.weights)]
        return sha256(" ".join(parts).encode()).hexdigest()[:32]
