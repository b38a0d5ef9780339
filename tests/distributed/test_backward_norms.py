"""Norms of gradients in shards, of updates inside backward: summed over ranks at once, of all or of the late ones."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from tests.distributed.group import Group
from tightfit.train.optimizer.backward_update import BackwardUpdate, SplitWeight, Update

HALVES = (torch.tensor([3.0, 4.0]), torch.tensor([5.0, 5.0]))
"""The gradient of every weight, by rank."""


@dataclass(frozen=True)
class Halved(SplitWeight):
    """A weight of which either rank has a half."""

    group: dist.ProcessGroup | None = None

    def groups(self) -> Iterator[dist.ProcessGroup]:
        assert self.group is not None
        yield self.group


def norm_of_three_weights(clip_norm: float) -> tuple[float, float]:
    """The norm, and what the last two weights' gradients are multiplied by, which wait for the first.

    Rank 0 knows one group of both ranks; for rank 1 the last weight's mesh has made another.
    """
    rank, (one, other) = dist.get_rank(), (dist.new_group([0, 1]), dist.new_group([0, 1]))
    weights = [torch.zeros(2, requires_grad=True) for _ in range(3)]
    groups = [one, one, one if rank == 0 else other]
    halves = [Halved(weight, group=group) for weight, group in zip(weights, groups, strict=True)]
    factors: list[float] = []
    early = [Update(halves[:1], lambda lr, factor: None)]
    late = Update(halves[1:], lambda lr, factor: factors.append(1.0 if factor is None else float(factor)))
    inside = BackwardUpdate(early, clip_norm=clip_norm, late=[late])
    norm = 0.0
    for _ in range(2):  # the first step knows no norms yet
        inside.begin(0.0)
        torch.stack([(weight * HALVES[rank]).sum() for weight in weights]).sum().backward()
        norm = float(inside.finish())
        for weight in weights:
            weight.grad = None
    return norm, factors[-1]


@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
def test_groups_of_the_same_ranks_are_one(group: Callable[[int], Group], clip_norm: float) -> None:
    norm = (3 * (25 + 50)) ** 0.5
    for found in group(2).run(norm_of_three_weights, clip_norm):
        assert found == pytest.approx((norm, clip_norm / norm if clip_norm else 1.0), rel=1e-4)
