"""Context ranks train as one process does: loss, norm, every gradient and every weight, by the equivalence check."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Literal
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.covering import above_four_ranks, covering, sampled, thorough
from tests.distributed.group import Group
from tests.distributed.training import GEMMA, GPT2, TIED, mesh_of
from tests.train.models import TINY, TINY_ROUTED
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.kernels.attention.attention import attention_eager
from tightfit.models.decoder import Decoder
from tightfit.models.presets import preset
from tightfit.models.spec import ModelSpec, Rope
from tightfit.parallel import context, ring
from tightfit.parallel.context import Context
from tightfit.parallel.mesh import context_group
from tightfit.parallel.row_split import RowSplit
from tightfit.prove.check_target import CheckTarget, miniature
from tightfit.prove.equivalence import Verdict, build_trained, compare
from tightfit.train.evaluation import evaluate
from tightfit.train.precision import LossScale
from tightfit.train.step import train_step

Make = Callable[[int], Group]
ZEROS: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)
ONE_KEY_HEAD = replace(TINY, kv_heads=1, qk_norm=True)
STRETCHED = replace(TINY, max_positions=32, rope=Rope(theta=1e4, scaling="dynamic", factors=(("factor", 2.0),)))
"""Rope that depends on the longest row, whose end only one of the ranks has."""
EXCHANGED: dict[str, tuple[ModelSpec, Layout, Levers]] = {
    **{f"zero-{zero}": (TINY, Layout(context=2, zero=zero, micro_batch=2), Levers()) for zero in ZEROS},
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


RINGS: dict[str, tuple[ModelSpec, Layout, Levers]] = {
    **{f"zero-{zero}": (TINY, Layout(context=2, ring=2, zero=zero, micro_batch=2), Levers()) for zero in (0, 3)},
    "four": (TINY, Layout(context=4, ring=4, zero=2, micro_batch=2), Levers()),
    "one-key-head": (ONE_KEY_HEAD, Layout(context=4, ring=4, zero=1, micro_batch=1), Levers(checkpoint_every=1)),
    "windows-and-caps": (GEMMA, Layout(context=4, ring=4, zero=3, micro_batch=2), Levers(checkpoint_every=1)),
    "both": (TINY, Layout(context=4, ring=2, zero=3, micro_batch=2), Levers()),
    "both-windows-and-caps": (GEMMA, Layout(context=4, ring=2, micro_batch=2), Levers()),
    "eight": (ONE_KEY_HEAD, Layout(context=8, ring=2, zero=3, micro_batch=1), Levers()),
    "learned-positions": (GPT2, Layout(context=2, ring=2, micro_batch=2), Levers()),
    "tiles": (TIED, Layout(context=2, ring=2, zero=3, micro_batch=1), Levers(checkpoint_every=1, tiles=2)),
    "kept": (TINY, Layout(context=2, ring=2, micro_batch=2), Levers(checkpoint_every=1, checkpoint_keep="attention")),
    "data-tensor": (TINY, Layout(context=2, ring=2, data=2, tensor=2, zero=2, micro_batch=1), Levers()),
    "stages": (TIED, Layout(context=2, ring=2, pipeline=2, zero=1, micro_batch=2), Levers()),
}


def judge(target: CheckTarget) -> Verdict:
    """Two steps with one model: a second one differs by updated weights, which are updated alike in all models."""
    steps = 2 if target.spec == TINY else 1
    return compare(target, mesh_of(target.layout), torch.device("cpu"), steps=steps)


def assert_same(group: Make, target: CheckTarget) -> None:
    verdict = group(target.layout.ranks).run(judge, target)[0]
    assert verdict.same, verdict.first
    assert verdict.largest.error < 2e-5
    assert verdict.compared > 50


@sampled(4)
@pytest.mark.parametrize("name", covering(EXCHANGED, costly=above_four_ranks))
def test_ranks_that_exchange_heads_train_as_one_process(group: Make, name: str) -> None:
    spec, layout, levers = EXCHANGED[name]
    assert_same(group, CheckTarget(spec, layout, levers, passes=2))


@sampled(4)
@pytest.mark.parametrize("name", covering(RINGS, costly=above_four_ranks))
def test_rings_train_as_one_process(group: Make, name: str) -> None:
    spec, layout, levers = RINGS[name]
    assert_same(group, CheckTarget(spec, layout, levers, passes=2))


@pytest.mark.parametrize(
    "layout",
    [Layout(context=4, ring=2, zero=3), thorough(Layout(context=4, zero=1)), thorough(Layout(context=2, tensor=2))],
    ids=str,
)
def test_miniatures_have_heads_for_all_ranks(group: Make, layout: Layout) -> None:
    """As `tightfit check` makes them of models that are too large."""
    small = miniature(CheckTarget(preset("gemma-2-9b"), layout, passes=2))
    assert small.spec.heads % (layout.ulysses_ranks * layout.tensor) == 0
    assert_same(group, small)


@pytest.mark.parametrize(
    "layout", [Layout(context=2, zero=3, micro_batch=2), thorough(Layout(context=4, ring=2, tensor=2))]
)
def test_routed_layers_balance_over_all_pieces_of_a_row(group: Make, layout: Layout) -> None:
    """Balance is not linear in tokens; with a large weight a wrong one would show."""
    assert TINY_ROUTED.experts is not None
    experts = replace(TINY_ROUTED.experts, balance_weight=1.0, z_weight=0.1)
    assert_same(group, CheckTarget(replace(TINY_ROUTED, experts=experts), layout, passes=2))


def whole_rows(target: CheckTarget) -> list[float]:
    """Losses of an evaluation and of steps on rows of one document each: plain causality, no boundaries."""
    mesh, device = mesh_of(target.layout), torch.device("cpu")
    many, alone = build_trained(target, mesh, device), build_trained(replace(target, layout=Layout()), None, device)
    batch = {name: tensor for name, tensor in target.micro_batches(1)[0].items() if name != "documents"}
    found = []
    for model in (many, alone):
        found.append(evaluate(model.module, [batch], device, model.ranks).loss)
        found += [
            train_step(model.module, model.optimizer, [batch], device, 1e-2, LossScale(), ranks=model.ranks).loss
            for _ in range(3)
        ]
    return found


@sampled(3)
@pytest.mark.parametrize(("spec", "ring_ranks"), covering(list(product((GEMMA, TINY), (1, 2, 4)))))
def test_rows_of_one_document_and_evaluation(group: Make, spec: ModelSpec, ring_ranks: int) -> None:
    target = CheckTarget(spec, Layout(context=4, ring=ring_ranks, zero=3, micro_batch=2))
    for losses in group(4).run(whole_rows, target):
        assert losses[:4] == pytest.approx(losses[4:], rel=1e-5)
        assert losses[3] < losses[1]


@contextmanager
def no_positions_across_ranks() -> Iterator[None]:
    """Every rank counts positions from its own first token."""

    def counted(self: Context, tokens: Tensor, documents: Tensor | None, cache: object) -> Tensor:
        own = tokens[:, : tokens.shape[1] // self.split.ranks]
        return Decoder.token_positions(self.model, own, None, None)

    with patch.object(Context, "token_positions", counted):
        yield


@contextmanager
def labels_cut_elsewhere() -> Iterator[None]:
    original = RowSplit.cut
    with patch.object(
        Context, "loss", lambda self, x, y, n=None: Decoder.loss(self.model, x, original(self.split, y.roll(1, 1)), n)
    ):
        yield


@contextmanager
def gradients_of_keys_stay() -> Iterator[None]:
    original = ring._KeyGradients._arrived
    with patch.object(ring._KeyGradients, "_arrived", lambda self: torch.zeros_like(original(self))):
        yield


@contextmanager
def outputs_not_joined() -> Iterator[None]:
    with patch.object(ring, "join_", lambda *_: None):
        yield


@contextmanager
def rope_of_own_pieces() -> Iterator[None]:
    with patch.object(context, "BY_LONGEST_ROW", ()):
        yield


FAULTS = {
    "positions": (no_positions_across_ranks, TINY, 1),
    "labels": (labels_cut_elsewhere, TINY, 1),
    "gradients": (gradients_of_keys_stay, TINY, 2),
    "outputs": (outputs_not_joined, TINY, 2),
    "rope": (rope_of_own_pieces, STRETCHED, 1),
}


def judge_faulty(target: CheckTarget, fault: str) -> Verdict:
    with FAULTS[fault][0]():
        return compare(target, mesh_of(target.layout), torch.device("cpu"), steps=1)


@sampled(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_gate_finds_what_is_broken(group: Make, fault: str) -> None:
    _, spec, ring_ranks = FAULTS[fault]
    broken = CheckTarget(spec, Layout(context=2, ring=ring_ranks, micro_batch=2), passes=3, length=64)
    assert not group(2).run(judge_faulty, broken, fault)[0].same


def narrow_ring(dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of this rank's part of one row, in `dtype`, of the same numbers on every rank."""
    group = context_group(mesh_of(Layout(context=4, ring=4)), "ring")
    assert group is not None
    split = RowSplit(ring=4, ring_rank=group.rank())
    own = split.cut(torch.arange(32)[None])[0]
    query, key, value, d_out = (x[:, :, own].to(dtype).requires_grad_() for x in narrow_row())
    out = ring.ring_attention(query, key, value, None, group, scale=0.3)
    return [own, out.detach(), *torch.autograd.grad(out, (query, key, value), d_out.detach())]


def narrow_row() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, 32, 8, generator=generator).bfloat16() for heads in (4, 2, 2, 4)]


def test_a_ring_in_16_bits_sums_in_float32(group: Make) -> None:
    """Beside the truth in float64: as near as attention on one rank whose result is rounded a few times."""
    query, key, value, d_out = (x.double() for x in narrow_row())
    query, key, value = (x.requires_grad_() for x in (query, key, value))
    seen = torch.ones(32, 32, dtype=torch.bool).tril()[None, None]
    truth = attention_eager(query, key, value, seen, scale=0.3)
    wanted = [truth.detach(), *torch.autograd.grad(truth, (query, key, value), d_out)]
    for own, *found in group(4).run(narrow_ring, torch.bfloat16):
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.dtype == torch.bfloat16
            error = (ours.double() - theirs[:, :, own]).norm() / theirs[:, :, own].norm()
            assert error < 0.008, float(error)


def test_rope_that_goes_by_the_longest_row(group: Make) -> None:
    assert_same(group, CheckTarget(STRETCHED, Layout(context=2, micro_batch=2), length=64))
