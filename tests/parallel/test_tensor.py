"""What documentation and planner say of tensor parallelism: what ranks send, what they keep, what is refused."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.covering import sampled
from tests.distributed.training import CPU, Case, build, micro_batches
from tests.parallel.fake import fake_group
from tests.parallel.test_data import Traffic
from tests.train.models import TINY, TINY_ROUTED
from tightfit.collectives.shards import splits_of
from tightfit.errors import UserError
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.rules.refusals import refused_by_trainer
from tightfit.jobs.rules.rule import Run
from tightfit.jobs.workload import Workload
from tightfit.levers import checkpointing
from tightfit.levers.policy.recompute import KeepLevel
from tightfit.memory.formulas.keeping import layer_levels
from tightfit.memory.formulas.local_shape import LocalShape, local_shape
from tightfit.models.spec import ModelSpec
from tightfit.parallel.apply import cut
from tightfit.parallel.mesh import make_mesh
from tightfit.parallel.ranks import Ranks
from tightfit.plan.seconds.tensor import TensorCalls, forward_calls, recompute_calls, regather_calls
from tightfit.prove.rehearsal import rehearse
from tightfit.train.precision import LossScale
from tightfit.train.step import train_step

ROWS, LENGTH = 4, 16
NAMES = {"allreduce_": "all_reduces", "_allgather_base_": "all_gathers", "_reduce_scatter_base_": "reduce_scatters"}
SPEC = replace(TINY, heads=8, kv_heads=4, layers=3, hidden_size=64)
"""Its stream of 64 tokens × 64 is larger than any sum of norms' gradients."""


def counted_calls(case: Case) -> tuple[TensorCalls, Counter[tuple[str, torch.dtype]]]:
    """Collectives of a step of one micro-batch over all of its tokens × hidden size, and the elements of the others."""
    with fake_group(case.layout.ranks):
        mesh = make_mesh(case.layout, "cpu")
        _, module, optimizer = build(case, mesh)
        with Traffic() as traffic:
            train_step(module, optimizer, micro_batches(case, 0, 0), CPU, 1e-3, LossScale(), ranks=Ranks.of(mesh))
    stream = ROWS * LENGTH * case.spec.hidden_size
    calls = {NAMES[name]: count // stream for (name, _), count in traffic.elements.items() if name in NAMES}
    rest = Counter({key: count % stream if key[0] in NAMES else count for key, count in traffic.elements.items()})
    return TensorCalls(**calls), rest


@sampled(2)
@pytest.mark.parametrize("every", [0, 1, 2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_traffic_is_what_the_planner_counts(sequence_parallel: bool, every: int) -> None:
    case = Case(
        spec=SPEC,
        tensor=4,
        sequence_parallel=sequence_parallel,
        rows=ROWS,
        micro_batch=ROWS,
        levers=Levers(checkpoint_every=every),
    )
    recomputed = {0: 0, 1: 3, 2: 2}[every]
    one_way = forward_calls(3, sequence_parallel=sequence_parallel)
    again = recompute_calls(recomputed, sequence_parallel=sequence_parallel)
    regathered = regather_calls(3 - recomputed, sequence_parallel=sequence_parallel)
    calls, rest = counted_calls(case)
    assert calls == TensorCalls(*map(sum, zip(one_way, one_way, again, regathered, strict=True)))
    norms = (2 * 3 + 1) * SPEC.hidden_size if sequence_parallel else 0  # once a step, all in one message
    assert +rest == +Counter({("allreduce_", torch.float32): norms})  # the loss's own are inside its operator


def kept_bytes(case: Case) -> int:
    """What autograd keeps of a forward pass on the first of the ranks, parameters left out."""
    with fake_group(case.layout.ranks):
        decoder, module, _ = build(case, make_mesh(case.layout, "cpu"))
        own = {p.untyped_storage()._cdata for p in decoder.parameters()}
        seen: dict[int, Any] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                seen[storage._cdata] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            made = module(**micro_batches(case, 0, 0)[0])
        kept = sum(storage.nbytes() for storage in seen.values())
        del made
        return kept


def test_a_split_stream_keeps_a_share_of_everything() -> None:
    """Of four ranks each keeps about a quarter: what was gathered for a block is let go of when it ends."""
    whole = kept_bytes(Case(spec=SPEC, rows=ROWS, micro_batch=ROWS))
    split = kept_bytes(Case(spec=SPEC, rows=ROWS, micro_batch=ROWS, tensor=4))
    plain = kept_bytes(Case(spec=SPEC, rows=ROWS, micro_batch=ROWS, tensor=4, sequence_parallel=False))
    stream = 4 * ROWS * LENGTH * SPEC.hidden_size
    assert plain > split + 3 * 3 * stream  # four whole streams a layer against four quarters
    assert split < whole / 4 + 2 * stream  # and the hidden states of the loss with their gradient


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_budget_is_spent_by_the_shape_that_was_planned(
    sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    levers = Levers(checkpoint_budget_bytes=2**20)
    case = Case(spec=SPEC, tensor=4, sequence_parallel=sequence_parallel, rows=ROWS, micro_batch=ROWS, levers=levers)
    asked: list[LocalShape] = []

    def noted(shape: LocalShape, *others: Any) -> tuple[KeepLevel, ...]:
        asked.append(shape)
        return layer_levels(shape, *others)

    monkeypatch.setattr(checkpointing, "layer_levels", noted)
    kept_bytes(case)
    workload = Workload(spec=SPEC, sequence_length=LENGTH, global_batch=ROWS, precision="fp32")
    assert asked == [local_shape(workload, case.layout, levers)]


def test_what_is_gathered_again_counts_as_activations() -> None:
    """In simulations: weights stay what they are, and backward holds the streams of all tokens."""
    layout = Layout(tensor=4, micro_batch=1)
    workload = Workload(spec=replace(SPEC, max_positions=4096), sequence_length=4096, global_batch=1, precision="fp32")
    lines = rehearse(workload, layout, Levers()).lines
    weights = {line.phase: line.bytes for line in lines if line.component == "weights"}
    assert weights["backward"] == weights["forward"] > 0
    again = [line.bytes for line in lines if line.detail == "gathered again" and line.phase == "backward"]
    assert again
    assert sum(again) % (4 * 4096 * SPEC.hidden_size) == 0


@pytest.mark.parametrize(
    ("spec", "layout", "levers", "words"),
    [
        (TINY, Layout(tensor=3), Levers(), "layout.tensor is 3, but the model has 4 attention heads"),
        (
            replace(TINY, heads=12, kv_heads=4, mlp_size=96),
            Layout(tensor=6),
            Levers(),
            "layout.tensor is 6, but the model has 4 key and value heads",
        ),
        (replace(TINY, mlp_size=65), Layout(tensor=2), Levers(), "has 65 MLP columns; give a number that divides them"),
        (TINY_ROUTED, Layout(tensor=2), Levers(loss="plain"), "levers.loss is plain, which needs all logits"),
        (TINY, Layout(tensor=2), Levers(optimizer_states="factored"), "needs all rows and columns of a weight"),
        (TINY, Layout(tensor=2), Levers(optimizer_states="8bit"), "blocks of 256 do not divide rows cut in 2"),
        (replace(SPEC, vocab_size=9), Layout(tensor=4), Levers(), "leaves a rank without any of 9 tokens"),
    ],
)
def test_what_cannot_be_split_gets_a_sentence(spec: ModelSpec, layout: Layout, levers: Levers, words: str) -> None:
    sentence = refused_by_trainer(Run(layout=layout, levers=levers, spec=spec))
    assert sentence is not None
    assert words in sentence
    decoder, _, _ = build(Case(spec=spec), None)
    with pytest.raises(UserError, match=r"layout\.(tensor|sequence_parallel)"):
        cut(decoder, None, layout, levers)
    assert refused_by_trainer(Run(layout=Layout(), levers=levers, spec=spec)) is None


def test_every_parameter_has_its_split() -> None:
    """Nothing is whole by accident: only norms, biases after a sum, positions and the router are."""
    with fake_group(2):
        for spec in (replace(TINY, qk_norm=True, qkv_bias=True, output_bias=True, mlp_bias=True), TINY_ROUTED):
            decoder, _, _ = build(Case(spec=spec, tensor=2), make_mesh(Layout(tensor=2), "cpu"))
            splits = splits_of(decoder)
            assert splits.keys() >= dict(decoder.named_parameters()).keys()
            whole = {n for n, split in splits.items() if split.dim is None}
            assert all("norm" in n or "router" in n or n.endswith(("o.bias", "down.bias")) for n in whole), whole
            assert all(splits[n].partial_gradient for n in whole)
