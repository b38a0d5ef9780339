"""The norm of gradients in shards, where updates inside backward do not clip: summed over ranks once, at the end."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from tests.distributed.group import Group
from tightfit.train.optimizer.backward_update import BackwardUpdate, EarlyUpdate

HALVES = (torch.tensor([3.0, 4.0]), torch.tensor([5.0, 5.0]))
"""The gradient of every weight, by rank."""


@dataclass(frozen=True)
class Halved(EarlyUpdate):
    """A weight of which either rank has a half."""

    group: dist.ProcessGroup | None = None

    def groups(self) -> Iterator[dist.ProcessGroup]:
        assert self.group is not None
        yield self.group


def norm_of_three_weights() -> float:
    """Rank 0 knows one group of both ranks; for rank 1 the second weight's mesh has made another."""
    rank, (one, other) = dist.get_rank(), (dist.new_group([0, 1]), dist.new_group([0, 1]))
    weights = [torch.zeros(2, requires_grad=True) for _ in range(3)]
    groups = [one, one if rank == 0 else other, one]
    updates = [
        Halved(weight, lambda lr, factor: None, group=group) for weight, group in zip(weights, groups, strict=True)
    ]
    inside = BackwardUpdate(list(updates), clip_norm=0.0)
    inside.begin(0.0)
    torch.stack([(weight * HALVES[rank]).sum() for weight in weights]).sum().backward()
    return float(inside.finish())


def test_groups_of_the_same_ranks_are_one(group: Callable[[int], Group]) -> None:
    assert group(2).run(norm_of_three_weights) == pytest.approx([(3 * (25 + 50)) ** 0.5] * 2)
