"""States, checkpoints and weights on the host of every rank: trained as one process without levers does."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.covering import covering, sampled, thorough
from tests.distributed.group import Group
from tests.distributed.training import UNEVEN, Case, mesh_of, run_rank, together, truth
from tests.train.models import TINY, TINY_ROUTED
from tightfit.jobs.job import Optimizer
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers, Offload
from tightfit.models.presets import preset
from tightfit.prove.check_target import CheckTarget
from tightfit.prove.equivalence import Verdict, compare

Make = Callable[[int], Group]
DEEP = replace(TINY, layers=4, tied=True)
assert TINY_ROUTED.experts is not None
UNBALANCED = replace(TINY_ROUTED, experts=replace(TINY_ROUTED.experts, balance_weight=0.0))
"""Without the loss that balances experts, which is of a rank's own rows."""
UNEVEN_HEADS = replace(TINY, qk_norm=True, vocab_size=97)
LAYOUTS = {
    "zero-0": Layout(data=2, micro_batch=2),
    "zero-1": Layout(data=2, zero=1, micro_batch=2),
    "zero-2": Layout(data=2, zero=2, micro_batch=2),
    "zero-3": Layout(data=2, zero=3, micro_batch=2),
    "hybrid": Layout(data=4, zero=3, shard_inside=2, micro_batch=1),
    "tensor": Layout(tensor=2, micro_batch=2),
    "tensor-zero-3": Layout(tensor=2, data=2, zero=3, micro_batch=2),
    "stages": Layout(pipeline=2, micro_batch=2),
    "interleaved": Layout(pipeline=2, micro_batch=2, schedule="interleaved", stages_per_rank=2),
    "stages-zero-1": Layout(pipeline=2, data=2, zero=1, micro_batch=2),
    "stages-data": Layout(pipeline=2, data=2, micro_batch=2),
    "zero-bubble": Layout(pipeline=2, micro_batch=2, schedule="zero-bubble"),
    "context": Layout(context=2, zero=3, micro_batch=2),
}


def judged(target: CheckTarget, steps: int) -> Verdict:
    return compare(target, mesh_of(target.layout), torch.device("cpu"), steps=steps)


def target_of(layout: Layout, **levers: Any) -> CheckTarget:
    spec = DEEP if layout.pipeline > 1 else replace(TINY, qk_norm=True)
    return CheckTarget(spec, layout, Levers(**levers), passes=2)


def assert_same(group: Make, target: CheckTarget, least: int = 60, steps: int = 2) -> None:
    verdict = group(target.layout.ranks).run(judged, target, steps)[0]
    assert verdict.same, verdict.first
    assert verdict.compared > least


@sampled(4)
@pytest.mark.parametrize("name", covering(LAYOUTS))
def test_optimizer_states_on_the_host(group: Make, name: str) -> None:
    assert_same(group, target_of(LAYOUTS[name], offload="optimizer"))


@pytest.mark.parametrize("name", ["zero-3", *map(thorough, ("zero-0", "tensor", "stages-zero-1"))])
def test_the_hosts_cores_update(group: Make, name: str) -> None:
    assert_same(group, target_of(LAYOUTS[name], offload="optimizer", offload_update="host"))


def test_some_states_stay_on_the_gpu(group: Make) -> None:
    levers = {"offload": "optimizer", "offload_keep_bytes": 12_000}
    assert_same(group, target_of(LAYOUTS["zero-3"], **levers))


def test_a_routed_model_offloads(group: Make) -> None:
    assert_same(group, CheckTarget(TINY_ROUTED, LAYOUTS["tensor"], Levers(offload="optimizer"), passes=2))


CORRECTED = replace(preset("tiny-deepseek-v3"), vocab_size=96)


@sampled(2)
@pytest.mark.parametrize(("offload", "zero"), [("optimizer", 1), ("weights", 3), thorough("weights", 0)])
def test_biases_that_are_not_trained_stay(group: Make, offload: Offload, zero: int) -> None:
    """Those that balance experts: FSDP2 gathers them with a layer, and no optimizer has them."""
    layout = Layout.model_validate({"data": 2, "zero": zero, "micro_batch": 2})
    assert_same(group, CheckTarget(CORRECTED, layout, Levers(offload=offload, checkpoint_every=1), passes=2))


@sampled(3)
@pytest.mark.parametrize(
    ("zero", "tensor", "precision", "levers"),
    [
        thorough(0, 1, "fp32", {"optimizer_states": "8bit"}),
        (3, 1, "fp32", {"optimizer_states": "8bit"}),
        (1, 1, "bf16", {"optimizer_states": "bf16"}),
        thorough(0, 2, "bf16", {"optimizer_states": "bf16"}),
        (3, 1, "fp16", {}),
        thorough(3, 1, "pure-bf16", {"optimizer_states": "fp32", "rounding": "stochastic"}),
        (0, 2, "pure-bf16", {"optimizer_states": "fp32", "rounding": "stochastic"}),
    ],
)
def test_every_state_format_is_updated_on_the_host_as_on_the_gpu(
    group: Make, zero: int, tensor: int, precision: Any, levers: dict[str, Any]
) -> None:
    """Under ZeRO with masters gradients are rounded to 16 bits once they are reduced, so weights differ a little."""
    case = Case(data=3 - tensor, zero=zero, tensor=tensor, micro_batch=4, precision=precision, states=True)
    plain = replace(case, levers=Levers(**{"optimizer_states": "fp32"} | levers))
    away = replace(case, levers=Levers(offload="optimizer", **levers))
    ours, theirs = (together(group(2).run(run_rank, each)) for each in (away, plain))
    assert ours.states.keys() == theirs.states.keys()
    exact = precision == "pure-bf16" or not zero
    for name, state in theirs.states.items():
        assert ours.states[name].dtype == state.dtype
        if name.startswith("master/") and precision != "fp32":
            assert torch.allclose(ours.states[name].float(), state.float(), atol=3e-3), name
    for name, weight in theirs.last.items():
        tolerance = 1e-6 if exact else 3e-3
        assert torch.allclose(ours.last[name].float(), weight.float(), atol=tolerance, rtol=1e-2), name


@pytest.mark.parametrize(
    "name", ["zero-0", *map(thorough, ("interleaved", "tensor-zero-3", "stages", "stages-zero-1"))]
)
def test_checkpoints_on_the_host(group: Make, name: str) -> None:
    layout = LAYOUTS[name]
    spec = replace(DEEP, layers=6) if layout.pipeline > 1 else TINY
    levers = Levers(checkpoint_every=1, offload_checkpoints=True, offload="optimizer")
    assert_same(group, CheckTarget(spec, layout, levers, passes=4))


def test_uneven_shards(group: Make) -> None:
    """One of four ranks has no rows of some matrices."""
    assert_same(group, CheckTarget(UNEVEN, Layout(data=4, zero=3, micro_batch=1), Levers(offload="optimizer")))


UNCLIPPED = Optimizer(lr=1e-3, eps=1e-4, clip_norm=0)
IN_BACKWARD: dict[str, dict[str, Any]] = {
    "zero-1": {},
    "zero-2": {"offload": "optimizer"},
    "zero-3": {"offload": "optimizer", "offload_update": "host"},
    "hybrid": {"checkpoint_every": 1},
    "context": {"tiles": 2},
    "tensor": {"offload": "optimizer"},
    "tensor-zero-3": {"checkpoint_every": 1},
}


@sampled(2)
@pytest.mark.parametrize(
    "name", ["zero-1", "zero-3", "context", "tensor", *map(thorough, ("zero-2", "hybrid", "tensor-zero-3"))]
)
def test_updates_inside_backward(group: Make, name: str) -> None:
    """Unclipped: what clips is an estimate, which depends on the order of the gradients."""
    levers = Levers(update_in_backward=True, **IN_BACKWARD[name])
    assert_same(group, CheckTarget(replace(TINY, tied=True), LAYOUTS[name], levers, settings=UNCLIPPED), least=40)


def test_expert_ranks_update_inside_backward(group: Make) -> None:
    layout = Layout(data=2, zero=3, expert=2, micro_batch=2)
    levers = Levers(update_in_backward=True, offload="optimizer")
    assert_same(group, CheckTarget(TINY_ROUTED, layout, levers, settings=UNCLIPPED), least=40)


@pytest.mark.parametrize("split", [{"tensor": 2}, {"data": 2, "zero": 2, "expert": 2, "spec": UNBALANCED}])
def test_ranks_that_split_weights_clip_alike_inside_backward(group: Make, split: dict[str, Any]) -> None:
    """Norms of the first step are exact; replicated weights stay equal to the bit, which `together` looks at."""
    settings = Optimizer(lr=1e-3, eps=1e-4, clip_norm=0.5)
    fields: dict[str, Any] = {"spec": UNEVEN_HEADS, "micro_batch": 4} | split
    case = Case(**fields, settings=settings)
    case = replace(case, micro_batch=8 // case.data, levers=Levers(update_in_backward=True))
    shares = group(2).run(run_rank, case)
    found = together(shares)
    alone = truth(replace(case, data=1, zero=0, tensor=1, expert=1, micro_batch=8))
    assert shares[0].results == shares[1].results
    assert found.results[0].gradient_norm == pytest.approx(alone.results[0].gradient_norm, rel=1e-4)
    for name, weight in alone.last.items():
        assert torch.allclose(found.last[name], weight, atol=2e-4), name


def test_ranks_that_clip_inside_backward_clip_alike(group: Make) -> None:
    case = Case(data=2, zero=3, micro_batch=4, steps=3, settings=Optimizer(lr=1e-3, eps=1e-4, clip_norm=0.5))
    case = replace(case, levers=Levers(update_in_backward=True))
    alone = truth(replace(case, data=1, zero=0, micro_batch=8))
    found = group(2).run(run_rank, case)
    assert found[0].results == found[1].results
    assert found[0].results[0].gradient_norm == pytest.approx(alone.results[0].gradient_norm, rel=1e-4)
    for ours, theirs in zip(found[0].results, alone.results, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-2)
        assert ours.gradient_norm == pytest.approx(theirs.gradient_norm, rel=5e-2)


SHARDED: dict[str, dict[str, Any]] = {
    "zero-1": {},
    "zero-2": {"offload_update": "host"},
    "zero-3": {"offload_keep_bytes": 12_000},
    "hybrid": {"checkpoint_every": 1, "offload_checkpoints": True},
    "tensor-zero-3": {"tiles": 2},
    "stages-zero-1": {"checkpoint_every": 1},
    "context": {},
}


@sampled(2)
@pytest.mark.parametrize(
    "name", ["zero-2", "zero-3", "stages-zero-1", *map(thorough, ("zero-1", "tensor-zero-3", "hybrid", "context"))]
)
def test_shards_of_weights_on_the_host(group: Make, name: str) -> None:
    """Two micro-batches, so that a step's later gathers find older weights in the buffers."""
    spec = replace(DEEP, layers=5)
    assert_same(group, CheckTarget(spec, LAYOUTS[name], Levers(offload="weights", **SHARDED[name]), passes=2))


def test_uneven_shards_of_weights_and_of_experts_on_the_host(group: Make) -> None:
    """Padded where FSDP2 gathers them; of experts, each rank has its own and gathers them from itself alone."""
    assert_same(group, CheckTarget(UNEVEN, Layout(data=4, zero=3, micro_batch=1), Levers(offload="weights")))
    routed = Layout(data=2, zero=3, expert=2, micro_batch=2)
    levers = Levers(offload="weights", update_in_backward=True)
    assert_same(group, CheckTarget(TINY_ROUTED, routed, levers, settings=UNCLIPPED), least=40)


@sampled(2)
@pytest.mark.parametrize("name", ["zero-0", "interleaved", *map(thorough, ("tensor", "stages", "stages-data"))])
def test_weights_on_the_host(group: Make, name: str) -> None:
    layout = LAYOUTS[name]
    levers = Levers(offload="weights", checkpoint_every=1, offload_checkpoints=layout.pipeline > 1)
    assert_same(group, CheckTarget(replace(DEEP, layers=6), layout, levers, passes=4))
