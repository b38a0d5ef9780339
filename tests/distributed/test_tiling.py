"""Sequence tiling on several ranks: weights are gathered once a layer, gradients reduced once a weight."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.distributed.group import Group
from tests.distributed.training import GEMMA, Case, run_rank, together, truth
from tightfit.jobs.levers import Levers


@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_train_in_tiles_as_one_process_does_whole(group: Callable[[int], Group], zero: int) -> None:
    case = Case(spec=GEMMA, data=2, zero=zero, micro_batch=2, levers=Levers(tiles=3, checkpoint_every=1))
    found = together(group(2).run(run_rank, case))
    exact = truth(replace(case, data=1, zero=0, levers=Levers()))
    assert [r.loss for r in found.results] == pytest.approx([r.loss for r in exact.results], rel=2e-5)
    for name, gradient in exact.gradients[-1].items():
        assert (found.gradients[-1][name] - gradient).norm() <= 2e-5 * gradient.norm(), name
