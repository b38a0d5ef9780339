"""Endless, shuffled, resumable batches: torchdata's StatefulDataLoader over a sampler that counts rows.

Row p of the run, counted over all ranks, is row p mod N of the p div N-th permutation, so the whole state is the one
number p: resuming needs no replay, and the number of ranks can change as long as the global batch does not. Epochs
follow each other without a gap; a batch may span two. Rows are loaded in the training process (a copy from a memory
map), so nothing is prefetched and the state is that of the last batch yielded.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

from tightfit.errors import UserError
from tightfit.kernels.loss.linear_cross_entropy import IGNORE
from tightfit.train.data.shuffling import shuffled

Batch = dict[str, Tensor]


class EndlessRows:
    """Batches of row numbers for one rank; iterating again continues where the last iteration stood."""

    def __init__(self, rows: int, micro_batch: int, seed: int, rank: int, world: int) -> None:
        assert rows > 0, "there are no rows"
        assert 0 <= rank < world, f"rank {rank} of {world}"
        if micro_batch < 1:
            raise UserError(f"micro_batch is {micro_batch}; it must be at least 1")
        self.rows, self.micro_batch, self.seed, self.rank, self.world = rows, micro_batch, seed, rank, world
        self.consumed_rows = 0
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            first = self.consumed_rows + self.rank * self.micro_batch
            self.consumed_rows += self.world * self.micro_batch
            yield [self._row(position) for position in range(first, first + self.micro_batch)]

    def _row(self, position: int) -> int:
        epoch, index = divmod(position, self.rows)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, shuffled(self.rows, self.seed, f"epoch {epoch}")
        return int(self._order[index])

    def state_dict(self) -> dict[str, int]:
        """The position, with the number of rows and the seed that it is valid for."""
        return {"consumed_rows": self.consumed_rows, "rows": self.rows, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position in the same data and order."""
        if not all(type(state[name]) is int and state[name] >= 0 for name in ("consumed_rows", "rows", "seed")):
            raise ValueError("its row counts are no integers")
        for name, ours in (("rows", self.rows), ("seed", self.seed)):
            if state[name] != ours:
                raise UserError(
                    f"the checkpoint's data has {name} {state[name]}, this job's has {ours}; "
                    "resume with the same data, sequence length and seed"
                )
        self.consumed_rows = state["consumed_rows"]


class Loader(StatefulDataLoader):
    """Batches without end. Its state is plain JSON; loading it takes effect at once."""

    def __init__(self, dataset: Dataset[Batch], sampler: EndlessRows) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*set_vital")  # torchdata 0.11 calls what torch 2.13 retires
            # Every new iterator draws a random number; with its own generator, resuming leaves the global one alone.
            super().__init__(dataset, batch_sampler=sampler, num_workers=0, generator=torch.Generator())

    @property
    def consumed_rows(self) -> int:
        """Rows yielded so far, over all ranks and resumptions."""
        return self.batch_sampler.consumed_rows

    @property
    def epochs(self) -> float:
        """Passes over the data completed so far."""
        return self.consumed_rows / self.batch_sampler.rows

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        try:
            super().load_state_dict(state_dict)
            # The base class only remembers the state until it makes an iterator: make it now.
            if self.state_dict() != state_dict:
                raise ValueError("it lacks fields of a position")
        except (UserError, MemoryError):
            raise
        except Exception as error:  # torchdata may raise anything for a malformed state
            why = str(error) or type(error).__name__
            raise UserError(
                f"the checkpoint's position in the data cannot be used ({why}); resume from an older checkpoint"
            ) from error


def make_loader(dataset: Dataset[Batch], *, micro_batch: int, seed: int, rank: int = 0, world: int = 1) -> Loader:
    """The endless batches of rank `rank` of `world`, `micro_batch` rows each."""
    rows = len(dataset)  # type: ignore[arg-type]
    return Loader(dataset, EndlessRows(rows, micro_batch, seed, rank, world))


def evaluation_batches(dataset: Dataset[Batch], batch: int, *, rank: int = 0, world: int = 1) -> Iterator[Batch]:
    """All rows once, in order; the last batch may be short. Of several ranks, each takes every `world`-th batch.

    All ranks get the same number of batches, as they run forward together; where rows are short, a rank gets a row
    without labels.
    """
    rows = len(dataset)  # type: ignore[arg-type]
    for round_start in range(0, rows, batch * world):
        start = round_start + rank * batch
        found = [dataset[i] for i in range(start, min(start + batch, rows))]
        yield default_collate(found) if found else _uncounted(default_collate([dataset[0]]))


def _uncounted(batch: Batch) -> Batch:
    return batch | {"labels": torch.full_like(batch["labels"], IGNORE)}
