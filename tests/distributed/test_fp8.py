"""fp8 matmuls on several ranks: scaled per row, a token's codes do not depend on who else is on its rank."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.covering import sampled
from tests.distributed.group import Group
from tests.distributed.training import Case, run_rank, together, truth
from tests.train.models import TINY
from tightfit.jobs.levers import Levers


@sampled(2)
@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_train_in_fp8_as_one_process_does(group: Callable[[int], Group], zero: int) -> None:
    spec = replace(TINY, head_dim=16, mlp_size=96)
    case = Case(spec=spec, data=2, zero=zero, micro_batch=2, levers=Levers(matmul="fp8-row"))
    found, exact = together(group(2).run(run_rank, case)), truth(replace(case, data=1, zero=0))
    native = truth(replace(case, data=1, zero=0, levers=Levers()))
    losses = [result.loss for result in exact.results]
    assert [result.loss for result in found.results] == pytest.approx(losses, rel=1e-4)
    assert losses != pytest.approx([result.loss for result in native.results], rel=1e-4)
    for name, gradient in exact.gradients[0].items():
        assert (found.gradients[0][name] - gradient).norm() <= 1e-3 * gradient.norm(), name
