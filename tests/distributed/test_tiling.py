"""Sequence tiling on several ranks: weights are gathered once a layer, gradients reduced once a weight."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.covering import covering, sampled
from tests.distributed.group import Group
from tests.distributed.test_offload import assert_same
from tests.distributed.training import GEMMA, GPT2, Case, run_rank, together, truth
from tests.train.models import TINY
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.models.spec import ModelSpec
from tightfit.prove.check_target import CheckTarget

WHOLE_STREAM = Layout(tensor=2, sequence_parallel=False, micro_batch=2)
OWN_TOKENS = Layout(tensor=2, micro_batch=2)
TENSOR_AND_STAGES = Layout(tensor=2, pipeline=2, sequence_parallel=False, micro_batch=2)


TILED = [
    (replace(TINY, qk_norm=True), WHOLE_STREAM),
    (GPT2, WHOLE_STREAM),
    (replace(TINY, kv_heads=1), WHOLE_STREAM),
    (replace(TINY, qk_norm=True), OWN_TOKENS),
    (GPT2, OWN_TOKENS),
    (GEMMA, Layout(tensor=2, micro_batch=1)),
    (replace(TINY, kv_heads=1), Layout(tensor=2, data=2, zero=3, micro_batch=3)),
    (TINY, Layout(tensor=2, context=2, micro_batch=2)),
    (replace(TINY, layers=4, tied=True), TENSOR_AND_STAGES),
    (replace(TINY, layers=4), Layout(tensor=2, pipeline=2, micro_batch=2)),
    (replace(TINY, layers=4), Layout(pipeline=2, data=2, zero=1, micro_batch=2)),
]


@sampled(2)
@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_train_in_tiles_as_one_process_does_whole(group: Callable[[int], Group], zero: int) -> None:
    case = Case(spec=GEMMA, data=2, zero=zero, micro_batch=2, levers=Levers(tiles=3, checkpoint_every=1))
    found = together(group(2).run(run_rank, case))
    exact = truth(replace(case, data=1, zero=0, levers=Levers()))
    assert [r.loss for r in found.results] == pytest.approx([r.loss for r in exact.results], rel=2e-5)
    for name, gradient in exact.gradients[-1].items():
        assert (found.gradients[-1][name] - gradient).norm() <= 2e-5 * gradient.norm(), name


@sampled(4)
@pytest.mark.parametrize(
    ("spec", "layout"),
    covering(TILED),
)
def test_tensor_ranks_and_stages_tile(group: Callable[[int], Group], spec: ModelSpec, layout: Layout) -> None:
    """With biases, with fewer key heads than ranks, and where layers are recomputed."""
    assert_same(group, CheckTarget(spec, layout, Levers(tiles=3, checkpoint_every=1), passes=2), steps=1)
