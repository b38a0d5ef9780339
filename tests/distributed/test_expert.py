"""Expert ranks train as one process does: beside every way of splitting, with uneven, empty and one hot expert."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.covering import covering, sampled
from tests.distributed.group import Group
from tests.distributed.training import mesh_of
from tests.train.models import TINY_ROUTED
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.models.presets import preset
from tightfit.models.spec import Experts
from tightfit.parallel import expert
from tightfit.prove.check_target import CheckTarget
from tightfit.prove.equivalence import Verdict, build_trained, compare

Make = Callable[[int], Group]
EIGHT = Experts(count=8, per_token=3, mlp_size=32, balance_weight=0.01)
ROUTED = replace(TINY_ROUTED, experts=EIGHT)
SHARED = replace(TINY_ROUTED, experts=replace(EIGHT, shared_size=16, dense_layers=(0,)))
DEEP = replace(SHARED, layers=4, experts=replace(EIGHT, shared_size=16, dense_layers=(1,)))

LIMITED = replace(SHARED, experts=replace(EIGHT, shared_size=16, capacity_factor=0.75, z_weight=0.1))
"""Experts that drop tokens, and a z-loss."""
CORRECTED = replace(preset("tiny-deepseek-v3"), vocab_size=96)
"""Latent attention, groups of experts, and a bias that moves after each step."""


def choose_some(experts: tuple[int, ...], probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """In place of the router's choice: the same experts for every token."""
    chosen = torch.tensor(experts).expand(len(probabilities), -1)
    return probabilities.gather(1, chosen), chosen


def judge(target: CheckTarget, chosen: tuple[int, ...] = ()) -> Verdict:
    """The verdict of all ranks; where experts are given, every token goes to those. A bias that moves after a step is
    seen in the next."""
    always = (lambda scores, *_: choose_some(chosen, scores)) if chosen else None
    mesh = mesh_of(target.layout)
    if always is None:
        return compare(target, mesh, torch.device("cpu"), steps=2 if target.spec.experts == CORRECTED.experts else 1)
    with patch("tightfit.models.layers.mlp.choose", always):
        return compare(target, mesh, torch.device("cpu"), steps=1)


def require_same(found: list[Verdict]) -> None:
    assert found[0].same, found[0].first
    assert all(verdict == found[0] for verdict in found)
    assert found[0].compared > 50


CASES: dict[str, tuple[Any, dict[str, Any], Levers]] = {
    **{f"two-zero-{zero}": (ROUTED, {"data": 2, "expert": 2, "zero": zero}, Levers()) for zero in (0, 2)},
    "two-shared-checkpointed": (SHARED, {"data": 2, "expert": 2}, Levers(checkpoint_every=1)),
    "two-capacity": (LIMITED, {"data": 2, "expert": 2}, Levers(checkpoint_every=2)),
    "two-checkpointed": (ROUTED, {"data": 2, "expert": 2, "zero": 3}, Levers(checkpoint_every=1)),
    "two-products-kept": (
        SHARED,
        {"data": 2, "expert": 2},
        Levers(checkpoint_every=1, checkpoint_keep="matmuls"),
    ),
    **{f"four-by-two-zero-{zero}": (SHARED, {"data": 4, "expert": 2, "zero": zero}, Levers()) for zero in range(4)},
    "four": (ROUTED, {"data": 4, "expert": 4, "zero": 1}, Levers()),
    "hybrid": (ROUTED, {"data": 4, "expert": 2, "zero": 2, "shard_inside": 2}, Levers()),
    **{
        f"tensor-zero-{zero}": (SHARED, {"data": 2, "expert": 2, "tensor": 2, "zero": zero}, Levers(checkpoint_every=1))
        for zero in (0, 3)
    },
    **{
        f"stages-zero-{zero}": (DEEP, {"data": 2, "expert": 2, "pipeline": 2, "zero": zero}, Levers())
        for zero in (0, 1)
    },
    **{
        f"latent-corrected-zero-{zero}": (CORRECTED, {"data": 2, "expert": 2, "zero": zero}, Levers(checkpoint_every=1))
        for zero in (0, 3)
    },
    "latent-corrected-stages": (CORRECTED, {"data": 2, "expert": 2, "pipeline": 2, "zero": 1}, Levers()),
    "context": (SHARED, {"data": 2, "context": 2, "expert": 4, "zero": 1}, Levers()),
    "context-alone": (ROUTED, {"context": 2, "expert": 2, "zero": 3}, Levers(checkpoint_every=1)),
    "latent-corrected-context": (CORRECTED, {"context": 2, "expert": 2}, Levers()),
    "every-split": (
        DEEP,
        {"pipeline": 2, "context": 2, "tensor": 2, "expert": 2, "zero": 1},
        Levers(),
    ),
    "stages-zero-bubble": (
        DEEP,
        {"data": 2, "expert": 2, "pipeline": 2, "schedule": "zero-bubble"},
        Levers(),
    ),
}


def above_four_ranks(case: tuple[Any, dict[str, Any], Levers]) -> bool:
    """Four ranks show expert ranks beside each other split (a ring: test_doctor.py), though not beside several."""
    return Layout.model_validate({"micro_batch": 2, **case[1]}).ranks > 4


@sampled(4)
@pytest.mark.parametrize("name", covering(CASES, costly=above_four_ranks))
def test_expert_ranks_train_as_one_process_does(group: Make, name: str) -> None:
    spec, degrees, levers = CASES[name]
    layout = Layout.model_validate({"micro_batch": 2, **degrees})
    require_same(group(layout.ranks).run(judge, CheckTarget(spec, layout, levers, passes=2)))


LOADS = {"one rank idle": (0, 1, 2), "uneven": (6, 0, 7), "one hot": (5, 5, 5)}


RECOMPUTED = (Levers(), Levers(checkpoint_every=1), Levers(checkpoint_every=1, checkpoint_keep="matmuls"))


@sampled(2)
@pytest.mark.parametrize(("load", "zero", "levers"), covering(list(product(LOADS, (0, 3), RECOMPUTED))))
def test_whatever_the_load(group: Make, load: str, zero: int, levers: Levers) -> None:
    """A rank that gets nothing still answers, and experts that get nothing have gradients of zero; a recomputed layer
    has all tokens of a rank, also where fewer rows come to it."""
    layout = Layout.model_validate({"data": 2, "expert": 2, "zero": zero, "micro_batch": 2})
    require_same(group(2).run(judge, CheckTarget(ROUTED, layout, levers, passes=2), LOADS[load]))


def count_sent(target: CheckTarget) -> int:
    """Elements of hidden size that this rank sends to expert ranks in a step, to itself included."""
    sent, send = [], dist.all_to_all_single

    def counted(out: Tensor, given: Tensor, *sizes: Any, **options: Any) -> Any:
        sent.append(given.numel() if given.ndim == 2 and given.is_floating_point() else 0)
        return send(out, given, *sizes, **options)

    mesh, device = mesh_of(target.layout), torch.device("cpu")
    model = build_trained(target, mesh, device)
    with patch.object(dist, "all_to_all_single", counted):
        model.step(target, 1, lambda phase: None)
    return sum(sent)


@pytest.mark.parametrize(("every", "times"), [(0, 4), (1, 5)])
def test_rows_are_sent_as_often_as_the_page_says(group: Make, every: int, times: int) -> None:
    """There and back, forward and backward; a recomputed layer sends them there once more, and not back."""
    layout, passes = Layout(data=2, expert=2, micro_batch=2), 2
    target = CheckTarget(ROUTED, layout, Levers(checkpoint_every=every), passes=passes)
    found = sum(group(2).run(count_sent, target))
    rows = layout.data * passes * layout.micro_batch * target.length * EIGHT.per_token
    assert found == times * ROUTED.layers * rows * ROUTED.hidden_size


def lose_gradients(target: CheckTarget) -> Verdict:
    with patch("tightfit.train.step.sum_expert_gradients", lambda model: None):
        return compare(target, mesh_of(target.layout), torch.device("cpu"), steps=1)


def test_gradients_that_are_not_summed_are_found(group: Make) -> None:
    layout = Layout(data=4, expert=2, micro_batch=2)
    verdict = group(4).run(lose_gradients, CheckTarget(ROUTED, layout, passes=1))[0]
    assert verdict.first is not None
    assert verdict.first.kind == "gradient"
    assert ".experts." in verdict.first.name


def swap_rows(target: CheckTarget) -> Verdict:
    """Rows of the first two tokens are exchanged on their way home."""
    true = expert.RowExchange.wait

    def wait(exchange: expert.RowExchange) -> list[Tensor]:
        arrived = true(exchange)
        return [x[[1, 0, *range(2, len(x))]] if x.ndim == 2 and len(x) > 1 else x for x in arrived]

    with patch.object(expert.RowExchange, "wait", wait):
        return compare(target, mesh_of(target.layout), torch.device("cpu"), steps=1)


def test_rows_that_come_to_the_wrong_token_are_found(group: Make) -> None:
    verdict = group(2).run(swap_rows, CheckTarget(ROUTED, Layout(data=2, expert=2, micro_batch=2), passes=1))[0]
    assert not verdict.same
