"""Context ranks train as one process does: loss, norm, every gradient and every weight, through the equivalence check."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.distributed.group import Group
from tests.distributed.training import GEMMA, GPT2, TIED, mesh_of
from tests.train.models import TINY
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.models.spec import ModelSpec, Rope
from tightfit.prove.check_target import CheckTarget
from tightfit.prove.equivalence import Verdict, compare

Make = Callable[[int], Group]
ONE_KEY_HEAD = replace(TINY, kv_heads=1, qk_norm=True)
STRETCHED = replace(TINY, max_positions=8, rope=Rope(theta=1e4, scaling="dynamic", factors=(("factor", 2.0),)))
"""Rope that depends on the longest row, whose end only one of the ranks has."""
PACKED = Levers(checkpoint_every=1)
EXCHANGED: dict[str, tuple[ModelSpec, Layout, Levers]] = {
    **{f"zero-{zero}": (TINY, Layout(context=2, zero=zero, micro_batch=2), Levers()) for zero in range(4)},  # type: ignore[arg-type]
    "four": (replace(TINY, kv_heads=4), Layout(context=4, zero=3, micro_batch=2), Levers(checkpoint_every=1)),
    "four-fewer-key-heads": (TINY, Layout(context=4, micro_batch=2), Levers()),
    "one-key-head": (ONE_KEY_HEAD, Layout(context=4, zero=2, micro_batch=1), Levers()),
    "windows-and-caps": (GEMMA, Layout(context=2, zero=3, micro_batch=2), Levers(checkpoint_every=1)),
    "learned-positions": (GPT2, Layout(context=2, micro_batch=2), Levers()),
    "tiles": (TIED, Layout(context=2, zero=3, micro_batch=1), Levers(checkpoint_every=1, tiles=2)),
    "kept-attention": (TINY, Layout(context=2, micro_batch=2), Levers(checkpoint_every=1, checkpoint_keep="attention")),
    "data": (TINY, Layout(context=2, data=2, zero=1, micro_batch=1), Levers()),
    "hybrid": (TINY, Layout(context=2, data=4, zero=3, shard_inside=2, micro_batch=1), Levers()),
    "tensor": (TINY, Layout(context=2, tensor=2, micro_batch=2), Levers(checkpoint_every=1)),
    "tensor-whole": (TINY, Layout(context=2, tensor=2, sequence_parallel=False, zero=1, micro_batch=2), Levers()),
    "stages": (TIED, Layout(context=2, pipeline=2, zero=1, micro_batch=2), Levers()),
    "stages-replicas": (TIED, Layout(context=2, pipeline=2, micro_batch=2), Levers()),
    "stages-tensor": (TIED, Layout(context=2, pipeline=2, tensor=2, micro_batch=1), Levers()),
}


def judge(target: CheckTarget) -> Verdict:
    return compare(target, mesh_of(target.layout), torch.device("cpu"), steps=2)


def assert_same(group: Make, target: CheckTarget) -> None:
    verdict = group(target.layout.ranks).run(judge, target)[0]
    assert verdict.same, verdict.first
    assert verdict.largest.error < 2e-5
    assert verdict.compared > 50


@pytest.mark.parametrize("name", EXCHANGED)
def test_ranks_that_exchange_heads_train_as_one_process(group: Make, name: str) -> None:
    spec, layout, levers = EXCHANGED[name]
    assert_same(group, CheckTarget(spec, layout, levers, passes=2))


def test_rope_that_goes_by_the_longest_row(group: Make) -> None:
    assert_same(group, CheckTarget(replace(STRETCHED, max_positions=32), Layout(context=2, micro_batch=2), length=64))
