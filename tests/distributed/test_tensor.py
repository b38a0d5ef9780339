"""Tensor ranks train as one process does, alone and beside every way of splitting data; so do hybrid shards."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.covering import covering, sampled
from tests.distributed.group import Group
from tests.distributed.test_equivalence import assert_same
from tests.distributed.training import (
    GEMMA,
    GPT2,
    UNEVEN,
    Case,
    build,
    mesh_of,
    micro_batches,
    run_rank,
    together,
    truth,
)
from tests.train.models import TINY, TINY_ROUTED
from tightfit.collectives.shards import as_dtensor, splits_of, whole
from tightfit.errors import UserError
from tightfit.jobs.job import Optimizer
from tightfit.jobs.levers import Levers
from tightfit.models.spec import Experts

Make = Callable[[int], Group]
CLIPPED = Optimizer(lr=1e-3, eps=1e-4, clip_norm=0.1)
FOUR = replace(TINY, kv_heads=4, qk_norm=True, qkv_bias=True, vocab_size=97)
"""Heads for four ranks, and a vocabulary that no number of ranks divides."""
BIASED = replace(GPT2, gated=True, activation="silu", rope=TINY.rope, qk_norm=True)
SHARED = replace(
    TINY_ROUTED,
    experts=Experts(count=4, per_token=2, mlp_size=32, shared_size=16, dense_layers=(0,), balance_weight=0.01),
)
CASES = {
    "two": Case(tensor=2),
    "two-accumulated-clipped": Case(spec=FOUR, tensor=2, micro_batch=2, settings=CLIPPED),
    "two-gemma": Case(spec=GEMMA, tensor=2, micro_batch=4),
    "two-learned-positions": Case(spec=GPT2, tensor=2, micro_batch=4),
    "two-biases": Case(spec=BIASED, tensor=2, micro_batch=4),
    "two-checkpointed": Case(spec=FOUR, tensor=2, micro_batch=4, levers=Levers(checkpoint_every=1)),
    "two-half-checkpointed": Case(
        spec=replace(FOUR, layers=3), tensor=2, micro_batch=4, levers=Levers(checkpoint_every=2, loss_chunk_bytes=1)
    ),
    "two-attention-kept": Case(tensor=2, micro_batch=4, levers=Levers(checkpoint_every=1, checkpoint_keep="attention")),
    "two-matmuls-kept": Case(tensor=2, micro_batch=4, levers=Levers(checkpoint_every=1, checkpoint_keep="matmuls")),
    "two-checkpoints-on-host": Case(
        tensor=2, micro_batch=4, levers=Levers(checkpoint_every=1, offload_checkpoints=True)
    ),
    "two-wide-moments": Case(tensor=2, micro_batch=4, levers=Levers(optimizer_states="fp32")),
    "four": Case(spec=FOUR, tensor=4),
    "four-on-two-key-heads": Case(spec=replace(TINY, qk_norm=True, qkv_bias=True), tensor=4, micro_batch=4),
    "four-on-one-key-head": Case(
        spec=replace(GEMMA, kv_heads=1), tensor=4, micro_batch=4, levers=Levers(checkpoint_every=1)
    ),
    "four-tied-checkpointed": Case(
        spec=replace(FOUR, tied=True), tensor=4, micro_batch=4, levers=Levers(checkpoint_every=1)
    ),
    **{
        f"two-by-two-zero-{zero}": Case(
            spec=replace(FOUR, tied=zero % 2 == 1),
            data=2,
            zero=zero,
            tensor=2,
            micro_batch=2,
            settings=CLIPPED,
            levers=Levers(checkpoint_every=zero // 2),
        )
        for zero in range(4)
    },
}
ALIKE = ("two-half-checkpointed", "two-checkpoints-on-host", "two-wide-moments")
"""Of these, what they add to others does not depend on how the stream is held."""
STREAMS = {
    f"{name}-{'split' if split else 'whole'}-stream": replace(case, sequence_parallel=split)
    for name, case in CASES.items()
    for split in (False, True)
    if split or name not in ALIKE
}


@sampled(5)
@pytest.mark.parametrize("name", covering(STREAMS))
def test_tensor_ranks_train_as_one_process_does(group: Make, name: str) -> None:
    """And what several ranks hold stays the same to the bit, which is how their parts are put together."""
    case = STREAMS[name]
    found = group(case.layout.ranks).run(run_rank, case)
    assert all(share.results == found[0].results for share in found)
    assert_same(together(found), truth(case.alone()))


@sampled(4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("spec", [TINY_ROUTED, SHARED], ids=["routed", "shared"])
def test_tensor_ranks_route_alike(group: Make, spec: object, sequence_parallel: bool) -> None:
    """Balance is not linear in rows: the truth takes the same micro-batches."""
    case = Case(spec=spec, tensor=2, micro_batch=4, sequence_parallel=sequence_parallel)  # type: ignore[arg-type]
    assert_same(together(group(2).run(run_rank, case)), truth(replace(case.alone(), micro_batch=4)))


@sampled(3)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_shards_inside_groups_train_as_one_process_does(group: Make, zero: int) -> None:
    case = Case(spec=UNEVEN, data=4, zero=zero, shard_inside=2, micro_batch=1, settings=CLIPPED)
    assert_same(together(group(4).run(run_rank, case)), truth(case.alone()))


@pytest.mark.parametrize("precision", ["bf16", "pure-bf16"])
def test_sixteen_bits_stay_near_the_truth(group: Make, precision: str) -> None:
    """As near as one process in 16 bits is; states have its formats and, whole, its shapes."""
    case = Case(tensor=2, micro_batch=4, steps=2, precision=precision, states=True)  # type: ignore[arg-type]
    alone = truth(replace(case, tensor=1))
    exact, found = truth(case.alone_in("fp32")), together(group(2).run(run_rank, case))
    assert {n: (t.dtype, t.shape) for n, t in found.states.items()} == {
        n: (t.dtype, t.shape) for n, t in alone.states.items()
    }
    assert alone.states
    for name, gradient in exact.gradients[0].items():
        ours, theirs = ((t.gradients[0][name].float() - gradient).norm() / gradient.norm() for t in (found, alone))
        assert 0 < ours < 1.5 * theirs + 2e-3, name
    assert [r.loss for r in found.results] == pytest.approx([r.loss for r in exact.results], rel=2e-2)


def test_eight_bit_states_are_those_of_one_process(group: Make) -> None:
    """Where blocks of a row stay whole on a rank; from the same gradients the same bits."""
    spec = replace(TINY, head_dim=128, mlp_size=512, layers=1)
    case = Case(spec=spec, tensor=2, micro_batch=4, steps=1, levers=Levers(optimizer_states="8bit"), states=True)
    found, alone = together(group(2).run(run_rank, case)), truth(replace(case, tensor=1))
    assert alone.states
    for name, state in alone.states.items():
        assert found.states[name].shape == state.shape, name
        wrong = (found.states[name].float() - state.float()).abs() > 1e-5 + 1e-3 * state.float().abs()
        assert wrong.float().mean() < 0.02, name  # gradients differ in their last bits, and so may a code


def test_a_rank_holds_its_share(group: Make) -> None:
    """Of matrices and the vocabulary a quarter, up to a row; of norms all. The state dict describes whole tensors."""
    whole_shapes = {n: p.shape for n, p in build(Case(spec=FOUR), None)[0].named_parameters()}
    for shapes in group(4).run(shapes_held, Case(spec=FOUR, tensor=4)):
        for name, (held, told) in shapes.items():
            assert told == whole_shapes[name], name
            if len(told) == 2:
                assert held.numel() * 4 <= told.numel() + 4 * max(told), name
            else:
                assert held == told or held.numel() * 4 == told.numel(), name


def shapes_held(case: Case) -> dict[str, tuple[torch.Size, torch.Size]]:
    decoder, _, _ = build(case, mesh_of(case.layout))
    state = decoder.state_dict()
    assert all(
        torch.equal(whole(t), whole(as_dtensor(p.data, splits_of(decoder)[n])))
        for n, p in decoder.named_parameters()
        for t in [state[n]]
    )
    return {n: (p.shape, state[n].shape) for n, p in decoder.named_parameters()}


def test_rows_that_do_not_divide_are_refused(group: Make) -> None:
    case = Case(spec=FOUR, tensor=4, micro_batch=1, rows=1)
    sentences = group(4).run(step_on_odd_rows, case)
    assert all("1 rows of 15 tokens cannot be split evenly over 4 tensor ranks" in s for s in sentences)


def step_on_odd_rows(case: Case) -> str:
    decoder, _, _ = build(case, mesh_of(case.layout))
    batch = {name: value[:, :15] for name, value in micro_batches(case, 0, 0)[0].items()}
    try:
        decoder(**batch)
    except UserError as error:
        return str(error)
    return "nothing was wrong"
