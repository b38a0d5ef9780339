"""Several ranks train as one process does: losses, norms, every gradient and every weight, step after step."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.covering import covering, sampled
from tests.distributed.group import Group
from tests.distributed.training import (
    CPU,
    GEMMA,
    GPT2,
    SETTINGS,
    TIED,
    UNEVEN,
    Case,
    Share,
    Trace,
    build,
    mesh_of,
    micro_batches,
    run_rank,
    together,
    train,
    truth,
)
from tests.train.models import TINY_ROUTED
from tightfit.collectives.shards import is_shard
from tightfit.jobs.adapter import AdapterTraining
from tightfit.jobs.job import Optimizer
from tightfit.jobs.levers import Levers
from tightfit.jobs.quantize import Quantize
from tightfit.levers.fake_quantize import SCALE_PREFIX
from tightfit.parallel.ranks import ALONE, Ranks
from tightfit.train.precision import LossScale
from tightfit.train.quantized_result import quantized_parts
from tightfit.train.step import NotFiniteError, train_step

Make = Callable[[int], Group]
NEAR = 2e-5
"""‖found − truth‖ / ‖truth‖ of gradients summed in another order, in float32."""
CASES = {
    **{
        f"{zero}-{rows // 2 // micro}-micro-batches": Case(data=2, zero=zero, rows=rows, micro_batch=micro)
        for zero in range(4)
        for rows, micro in ((8, 4), (8, 2), (12, 2))
    },
    **{f"{zero}-tied": Case(spec=TIED, data=2, zero=zero, micro_batch=2) for zero in range(4)},
    **{
        f"{zero}-checkpointed": Case(data=2, zero=zero, micro_batch=2, levers=Levers(checkpoint_every=1))
        for zero in range(4)
    },
    **{
        f"{zero}-checkpoints-on-the-host": Case(
            data=2,
            zero=zero,
            micro_batch=2,
            levers=Levers(checkpoint_every=1, checkpoint_keep="matmuls", offload_checkpoints=True),
        )
        for zero in (0, 3)
    },
    **{f"{zero}-uneven-shards": Case(spec=UNEVEN, data=4, zero=zero, micro_batch=1) for zero in range(4)},
    "3-tied-checkpointed-four": Case(
        spec=TIED, data=4, zero=3, micro_batch=1, levers=Levers(checkpoint_every=2, loss_chunk_bytes=1)
    ),
    "3-gemma": Case(spec=GEMMA, data=2, zero=3, micro_batch=2),
    "3-learned-positions": Case(spec=GPT2, data=2, zero=3, micro_batch=2),
    "0-learned-positions": Case(spec=GPT2, data=2, zero=0, micro_batch=2),
    "3-plain-loss": Case(data=2, zero=3, micro_batch=4, levers=Levers(loss="plain")),
    "3-clipped": Case(data=4, zero=3, micro_batch=2, settings=Optimizer(lr=1e-3, clip_norm=0.1)),
    "0-clipped": Case(data=4, zero=0, micro_batch=2, settings=Optimizer(lr=1e-3, clip_norm=0.1)),
}


def distance(found: Tensor, truth: Tensor) -> float:
    """‖found − truth‖ / ‖truth‖."""
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def assert_same(found: Trace, truth: Trace, near: float = NEAR) -> None:
    """Equal starts, and results that only the order of additions tells apart."""
    assert found.first.keys() == truth.first.keys()
    assert all(torch.equal(found.first[name], truth.first[name]) for name in truth.first)
    assert len(found.gradients) == len(truth.gradients) > 0
    for step, (ours, theirs) in enumerate(zip(found.results, truth.results, strict=True)):
        assert (ours.tokens, ours.skipped) == (theirs.tokens, theirs.skipped)
        assert ours.loss == pytest.approx(theirs.loss, rel=near)
        assert ours.gradient_norm == pytest.approx(theirs.gradient_norm, rel=near)
        assert found.gradients[step].keys() == truth.gradients[step].keys() == truth.first.keys()
        for name, gradient in truth.gradients[step].items():
            assert distance(found.gradients[step][name], gradient) < near, f"step {step}, {name}"
    for name, weight in truth.last.items():
        assert not torch.equal(weight, truth.first[name]), f"{name} was not trained"
        assert distance(found.last[name], weight) < near, name


@sampled(4)
@pytest.mark.parametrize("name", covering(CASES))
def test_ranks_train_as_one_process_does(group: Make, name: str) -> None:
    case = CASES[name]
    found = group(case.data).run(run_rank, case)
    assert all(share.results == found[0].results for share in found)
    assert_same(together(found), truth(case.alone()))


@sampled(2)
@pytest.mark.parametrize("split", [{"data": 2}, {"data": 2, "zero": 3}, {"tensor": 2}], ids=str)
def test_weights_shrink_as_on_one_process(group: Make, split: dict[str, int]) -> None:
    case = replace(Case(micro_batch=2, settings=SETTINGS.model_copy(update={"l1": 1.0})), **split)  # type: ignore[arg-type]
    found, alone = together(group(2).run(run_rank, case)), truth(case.alone())
    assert_same(found, alone)
    zeros = [int((weight == 0).sum()) for weight in alone.last.values() if weight.ndim == 2]
    assert all(zeros)


@sampled(4)
@pytest.mark.parametrize(("zero", "scales"), [(0, "learned"), (1, "learned"), (2, "minmax"), (3, "learned")])
def test_rounded_weights_train_as_on_one_process(group: Make, zero: int, scales: str) -> None:
    rounding = Quantize.model_validate({"bits": 4, "group": 8, "scales": scales})
    case = Case(data=2, zero=zero, micro_batch=2, quantize=rounding, states=True)
    found, alone = together(group(2).run(run_rank, case)), truth(case.alone())
    assert_same(found, alone)
    assert found.states.keys() == alone.states.keys()
    learned = [name for name in alone.states if name.startswith(f"master/{SCALE_PREFIX}")]
    assert bool(learned) == (scales == "learned")
    for name in learned:
        assert distance(found.states[name], alone.states[name]) < NEAR, name


@pytest.mark.parametrize("micro_batch", [2, 4])
def test_adapters_train_as_on_one_process(group: Make, micro_batch: int) -> None:
    case = Case(data=2, micro_batch=micro_batch, adapter=AdapterTraining(rank=3), states=True)
    found, alone = together(group(2).run(run_rank, case)), truth(case.alone())
    for ours, theirs in zip(found.results, alone.results, strict=True):
        assert (ours.loss, ours.gradient_norm) == pytest.approx((theirs.loss, theirs.gradient_norm), rel=NEAR)
    trained = {name for name in alone.last if not torch.equal(alone.last[name], alone.first[name])}
    assert trained == alone.gradients[0].keys() == {name for name in alone.last if "lora_" in name}
    for name in alone.last:
        assert distance(found.last[name], alone.last[name]) < NEAR, name
    for step, gradients in enumerate(alone.gradients):
        for name, gradient in gradients.items():
            is_first = step == 0 and name.endswith("lora_a")  # while B is zero, A has no gradient
            assert bool(gradient.any()) != is_first
            assert is_first or distance(found.gradients[step][name], gradient) < NEAR, name


def test_sharded_weights_are_written_whole_as_codes(group: Make) -> None:
    case = Case(data=2, zero=3, quantize=Quantize(bits=3, group=8))
    wanted = stored_values(case.alone())
    for found in group(2).run(stored_values, case):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], values) for name, values in wanted.items())


def stored_values(case: Case) -> dict[str, Tensor]:
    """Every tensor that a run of rounded weights would write."""
    decoder, _, _ = build(case, None if case.layout.ranks == 1 else mesh_of(case.layout))
    parts = quantized_parts(decoder)
    return parts.plain | {name: coded.dequantize() for name, coded in parts.coded.items()}


@pytest.mark.parametrize("zero", [0, 3])
def test_routed_layers_count_their_balance_by_tokens(group: Make, zero: int) -> None:
    """Balance is not linear in rows, so the truth here takes the same micro-batches one after another."""
    case = Case(spec=TINY_ROUTED, data=2, zero=zero, micro_batch=2)
    assert_same(together(group(2).run(run_rank, case)), truth(replace(case, data=1, zero=0)))


@sampled(3)
@pytest.mark.parametrize(("zero", "precision"), covering(list(product(range(4), ("bf16", "fp16", "pure-bf16")))))
def test_sixteen_bits_are_as_near_the_truth_as_on_one_process(group: Make, zero: int, precision: str) -> None:
    case = Case(data=2, zero=zero, micro_batch=2, steps=2, precision=precision, states=True)  # type: ignore[arg-type]
    exact, alone = truth(case.alone_in("fp32")), truth(replace(case, data=1, zero=0))
    found = together(group(2).run(run_rank, case))
    assert {name: t.dtype for name, t in found.states.items()} == {name: t.dtype for name, t in alone.states.items()}
    assert alone.states
    scale = LossScale.for_precision(case.precision).value
    for name, gradient in exact.gradients[0].items():
        ours, theirs = (distance(trace.gradients[0][name].float() / scale, gradient) for trace in (found, alone))
        assert 0 < ours < 1.2 * theirs + 1e-3, name
    assert [r.loss for r in found.results] == pytest.approx([r.loss for r in exact.results], rel=2e-2)


def test_a_comparison_finds_a_wrong_scale(group: Make) -> None:
    """The same steps with every rank dividing by its own tokens only."""
    case = Case(data=2, micro_batch=4)
    with pytest.raises(AssertionError):
        assert_same(together(group(2).run(run_without_agreeing, case)), truth(case.alone()))


def run_without_agreeing(case: Case) -> Share:
    mesh = mesh_of(case.layout)
    return train(case, mesh, replace(ALONE, rank=Ranks.of(mesh).rank))


@pytest.mark.parametrize("zero", [0, 3])
def test_fp16_overflow_is_skipped_by_all_ranks_together(group: Make, zero: int) -> None:
    case = Case(data=2, zero=zero, micro_batch=2, steps=1, precision="fp16", scale=2.0**30)
    found = group(2).run(run_rank, case)
    assert [share.results[0].skipped for share in found] == [True, True]
    both = together(found)
    assert all(torch.equal(both.last[name], weight) for name, weight in both.first.items())


@sampled(2)
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_loss_that_is_not_finite_on_one_rank_stops_all(group: Make, zero: int) -> None:
    case = Case(data=4, zero=zero, micro_batch=2)
    assert group(4).run(step_with_one_bad_rank, case) == ["the loss is nan"] * 4


def step_with_one_bad_rank(case: Case) -> str:
    mesh = mesh_of(case.layout)
    ranks = Ranks.of(mesh)
    decoder, module, optimizer = build(case, mesh)
    if ranks.rank == 2:
        decoder.layers[1].mlp.register_forward_hook(lambda _, __, made: (made[0] * float("nan"), made[1]))
    try:
        train_step(module, optimizer, micro_batches(case, 0, ranks.rank), CPU, 1e-3, LossScale(), ranks=ranks)
    except NotFiniteError as error:
        return str(error)
    return "nothing was wrong"


def test_shards_are_shares(group: Make) -> None:
    """A rank of four holds a quarter of weights, moments and gradients, up to one row of each."""
    case = Case(spec=UNEVEN, data=4, zero=3, micro_batch=2)
    for held in group(4).run(held_elements, case):
        for kind, (mine, everything, rows) in held.items():
            assert everything > 0, kind
            assert mine <= everything / 4 + rows, kind


def held_elements(case: Case) -> dict[str, tuple[int, int, int]]:
    mesh = mesh_of(case.layout)
    ranks = Ranks.of(mesh)
    decoder, module, optimizer = build(case, mesh)
    batches, found = micro_batches(case, 0, ranks.rank), {}

    def count(kind: str, tensors: list[Tensor]) -> None:
        assert all(is_shard(tensor) for tensor in tensors)
        row = sum(tensor.shape[1:].numel() for tensor in tensors)
        found[kind] = (sum(t.to_local().numel() for t in tensors), sum(t.numel() for t in tensors), row)  # type: ignore[attr-defined]

    def look(phase: str) -> None:
        if phase == "optimizer":
            count("gradients", [p.grad for p in decoder.parameters() if p.grad is not None])

    train_step(module, optimizer, batches, CPU, 1e-3, LossScale(), look, ranks)
    count("weights", list(decoder.parameters()))
    for kind in ("exp_avg", "exp_avg_sq"):
        count(kind, [state for name, state in optimizer.state().items() if name.startswith(f"{kind}/")])
    return found


def test_ddp_gradients_lie_in_its_buckets_from_step_to_step(group: Make) -> None:
    case = Case(data=2, micro_batch=1, rows=4, precision="bf16")
    for before, after in group(2).run(gradient_addresses, case):
        assert before == after
        assert len(set(before)) == len(before)


def gradient_addresses(case: Case) -> tuple[list[int], list[int]]:
    mesh = mesh_of(case.layout)
    ranks = Ranks.of(mesh)
    _, module, optimizer = build(case, mesh)
    seen = []
    for step in range(4):
        batches = micro_batches(case, step, ranks.rank)
        train_step(module, optimizer, batches, CPU, 1e-3, LossScale(), ranks=ranks)
        seen.append([p.grad.data_ptr() for p in module.parameters() if p.grad is not None])
    assert len(seen[1]) == len(list(module.parameters()))
    return seen[2], seen[-1]
