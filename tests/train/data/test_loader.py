"""The endless loader: each epoch every row once, and resuming anywhere continues exactly."""

import json
import os
import subprocess
import sys
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tightfit.errors import UserError
from tightfit.train.data.loader import Loader, evaluation_batches, make_loader
from tightfit.train.data.shuffling import shuffled


class Numbers(Dataset[dict[str, Tensor]]):
    """Row i says i."""

    def __init__(self, rows: int) -> None:
        self.rows, self.fetched = rows, 0

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.fetched += 1
        return {"tokens": torch.tensor([index, index])}


def take(loader: Loader, batches: int) -> list[list[int]]:
    return [batch["tokens"][:, 0].tolist() for batch in islice(iter(loader), batches)]


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state))


@pytest.mark.parametrize(("rows", "micro_batch"), [(12, 3), (10, 4), (7, 7), (3, 8), (1, 2)])
def test_every_epoch_visits_every_row_once(rows: int, micro_batch: int) -> None:
    loader = make_loader(Numbers(rows), micro_batch=micro_batch, seed=1)
    seen = [row for batch in take(loader, 5 * rows) for row in batch]
    epochs = [seen[start : start + rows] for start in range(0, len(seen) - rows + 1, rows)]
    assert len(epochs) == 5 * micro_batch
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    if rows > 5:
        assert epochs[0] != epochs[1]
        assert epochs[0] != take(make_loader(Numbers(rows), micro_batch=rows, seed=2), 1)[0]


@pytest.mark.parametrize(("rows", "micro_batch"), [(10, 4), (6, 3)])
def test_resuming_at_every_point_of_two_epochs_continues_exactly(rows: int, micro_batch: int) -> None:
    uninterrupted = take(make_loader(Numbers(rows), micro_batch=micro_batch, seed=3), 12)
    for done in range(2 * rows // micro_batch + 1):
        first = make_loader(Numbers(rows), micro_batch=micro_batch, seed=3)
        take(first, done)
        state = through_json(first.state_dict())
        resumed_data = Numbers(rows)
        resumed = make_loader(resumed_data, micro_batch=micro_batch, seed=3)
        resumed.load_state_dict(state)
        assert resumed_data.fetched == 0
        assert resumed.epochs == done * micro_batch / rows
        assert through_json(resumed.state_dict()) == state
        assert take(resumed, 2) == uninterrupted[done : done + 2]
        assert resumed_data.fetched == 2 * micro_batch
        again = make_loader(Numbers(rows), micro_batch=micro_batch, seed=3)
        again.load_state_dict(through_json(resumed.state_dict()))
        assert take(again, 3) == uninterrupted[done + 2 : done + 5]


def test_the_state_is_that_of_the_batch_last_given() -> None:
    data = Numbers(10)
    loader = make_loader(data, micro_batch=2, seed=0)
    fresh = through_json(loader.state_dict())
    assert loader.consumed_rows == 0
    batches = iter(loader)
    first = next(batches)["tokens"][:, 0].tolist()
    assert (data.fetched, loader.consumed_rows, loader.epochs) == (2, 2, 0.2)
    after_one = through_json(loader.state_dict())
    second = next(batches)["tokens"][:, 0].tolist()
    assert through_json(loader.state_dict()) != after_one
    loader.load_state_dict(after_one)
    assert take(loader, 1) == [second]
    loader.load_state_dict(fresh)
    loader.load_state_dict(fresh)
    assert take(loader, 2) == [first, second]


def test_iterating_again_continues() -> None:
    loader = make_loader(Numbers(10), micro_batch=2, seed=0)
    uninterrupted = take(make_loader(Numbers(10), micro_batch=2, seed=0), 6)
    assert take(loader, 2) + take(loader, 4) == uninterrupted


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_another_number_of_ranks_continues_with_the_same_global_batches(world: int) -> None:
    def step(loaders: list[Loader], accumulation: int) -> list[int]:
        return sorted(row for loader in loaders for batch in take(loader, accumulation) for row in batch)

    def ranks(count: int) -> list[Loader]:
        return [make_loader(Numbers(17), micro_batch=2, seed=5, rank=r, world=count) for r in range(count)]

    whole = ranks(1)
    expected = [step(whole, 6) for _ in range(6)]
    before = ranks(2)
    assert [step(before, 3) for _ in range(2)] == expected[:2]
    states = [through_json(loader.state_dict()) for loader in before]
    assert states[0] == states[1]
    after = ranks(world)
    for loader in after:
        loader.load_state_dict(states[0])
    assert [step(after, 6 // world) for _ in range(4)] == expected[2:]


def test_a_state_of_other_data_is_refused_at_once() -> None:
    state = make_loader(Numbers(10), micro_batch=2, seed=0).state_dict()
    with pytest.raises(UserError, match="the checkpoint's data has rows 10, this job's has 11; resume with the same"):
        make_loader(Numbers(11), micro_batch=2, seed=0).load_state_dict(state)
    with pytest.raises(UserError, match="the checkpoint's data has seed 0, this job's has 1"):
        make_loader(Numbers(10), micro_batch=2, seed=1).load_state_dict(state)


def test_a_micro_batch_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="micro_batch is 0; it must be at least 1"):
        make_loader(Numbers(10), micro_batch=0, seed=0)


def test_loading_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    loader = make_loader(Numbers(10), micro_batch=2, seed=0)
    take(loader, 3)
    loader.load_state_dict(loader.state_dict())
    assert torch.equal(torch.get_rng_state(), before)


def test_evaluation_sees_every_row_once_in_order() -> None:
    batches = [batch["tokens"][:, 0].tolist() for batch in evaluation_batches(Numbers(7), 3)]
    assert batches == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize(("rows", "batch", "world"), [(7, 3, 2), (7, 2, 4), (1, 4, 3), (8, 2, 2)])
def test_ranks_evaluate_every_row_once_in_equally_many_batches(rows: int, batch: int, world: int) -> None:
    class Labelled(Numbers):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return super().__getitem__(index) | {"labels": torch.tensor([index, index])}

    shares = [list(evaluation_batches(Labelled(rows), batch, rank=rank, world=world)) for rank in range(world)]
    assert {len(share) for share in shares} == {-(-rows // (batch * world))}
    counted = [label for share in shares for b in share for label in b["labels"][:, 0].tolist() if label != -100]
    assert sorted(counted) == list(range(rows))
    assert all(b["tokens"].shape == b["labels"].shape for share in shares for b in share)


def test_the_order_is_the_same_everywhere() -> None:
    """The expected numbers are frozen: a change would make every earlier checkpoint resume in another order."""
    assert shuffled(12, 0, "epoch 1").tolist() == [9, 4, 7, 0, 3, 5, 6, 8, 10, 1, 2, 11]
    program = "from tightfit.train.data.shuffling import shuffled; print(shuffled(50, 2**63 - 1, 'epoch 7').tolist())"
    command = [sys.executable, "-c", program]
    printed = {
        subprocess.check_output(command, text=True, env=os.environ | {"PYTHONHASHSEED": seed}) for seed in ("1", "2")
    }
    assert printed == {f"{shuffled(50, 2**63 - 1, 'epoch 7').tolist()}\n"}
