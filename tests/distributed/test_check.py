"""The equivalence gate: silent where ranks train as one process does; where a split is broken it says so, and where."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.fsdp import FSDPModule
from typer.testing import CliRunner

from tests.covering import above_four_ranks, covering, sampled, thorough
from tests.distributed.group import Group
from tests.distributed.training import mesh_of
from tests.plan.questions import planned
from tests.train.models import TINY, TINY_ROUTED
from tightfit.cli.main import app
from tightfit.collectives import conjugate
from tightfit.collectives.shards import local
from tightfit.errors import UserError
from tightfit.jobs.adapter import AdapterTraining
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.levers.adapter import attach
from tightfit.models.decoder import Decoder
from tightfit.models.presets import preset
from tightfit.parallel import data, pipeline, tensor
from tightfit.parallel.ranks import Ranks
from tightfit.prove import equivalence_check as gate
from tightfit.prove.check_target import SETTINGS, CheckTarget, exact_target, miniature, target_of
from tightfit.prove.equivalence import TOLERANCE, Verdict, compare
from tightfit.prove.equivalence_check import check
from tightfit.prove.question import read_question
from tightfit.train import step
from tightfit.train.optimizer import adamw as optimizer

Make = Callable[[int], Group]
TENSOR = Layout(tensor=2, micro_batch=2)
WHOLE_STREAM = Layout(tensor=2, micro_batch=2, sequence_parallel=False)
REPLICAS = Layout(data=2, micro_batch=2)
SHARDS = Layout(data=2, zero=3, micro_batch=2)
HYBRID = Layout(data=4, zero=2, shard_inside=2, micro_batch=2)


def judge(target: CheckTarget, fault: str | None = None, steps: int | None = None) -> Verdict:
    """The verdict of all ranks, with a fault in the splitting where one is asked for: it shows in the first step."""
    with FAULTS[fault]() if fault else patch.object(sys, "argv", sys.argv):
        return compare(target, mesh_of(target.layout), torch.device("cpu"), steps=steps or (1 if fault else 2))


def target(layout: Layout, **changes: Any) -> CheckTarget:
    return CheckTarget(replace(TINY, qk_norm=True), layout, passes=2, **changes)


@sampled(2)
@pytest.mark.parametrize("layout", [TENSOR, WHOLE_STREAM, REPLICAS, SHARDS], ids=["tensor", "whole", "ddp", "zero-3"])
def test_what_is_right_passes(group: Make, layout: Layout) -> None:
    verdicts = group(2).run(judge, target(layout, levers=Levers(checkpoint_every=1)))
    assert len(verdicts) == 2
    assert all(verdict == verdicts[0] for verdict in verdicts)
    assert verdicts[0].same
    assert verdicts[0].compared > 100
    assert 0 < verdicts[0].largest.error < 2e-5


def test_a_routed_model_passes(group: Make) -> None:
    assert group(2).run(judge, CheckTarget(TINY_ROUTED, TENSOR, passes=2))[0].same


def test_a_plan_of_last_resort_passes(group: Make, tmp_path: Path) -> None:
    """Weights on the host and updates inside backward, of a model that fits two cards in no other way."""
    plan = planned("llama-3.1-70b", "2xRTX4090", 4096, 8).plan
    assert plan.fits
    assert plan.levers.update_in_backward
    plan.save(tmp_path / "plan.json")
    checked = exact_target(miniature(target_of(read_question(tmp_path / "plan.json"))))
    verdict = group(2).run(judge, checked)[0]
    assert verdict.same, verdict.first


@pytest.mark.parametrize("fault", [None, "averages"])
def test_adapters_are_checked_where_a_job_trains_them(group: Make, fault: str | None) -> None:
    """Gradients are theirs alone, A's among them in the first step; the frozen weights stay as they began."""
    adapted = target(REPLICAS, adapter=AdapterTraining(rank=3, targets=["q", "down"]))
    verdict = group(2).run(judge, adapted, fault)[0]
    steps, matrices, weights = 1 if fault else 2, 2 * 2 * TINY.layers, len(adapted_weights(adapted))
    copies = start = weights
    assert verdict.compared == start + steps * (2 + matrices + weights + copies)
    assert verdict.same == (fault is None), verdict.first
    if verdict.first is not None:
        last = TINY.layers - 1
        assert (verdict.first.kind, verdict.first.layer) == ("gradient", last)
        assert verdict.first.name.endswith(("lora_a", "lora_b"))


def adapted_weights(checked: CheckTarget) -> list[str]:
    model = Decoder(checked.spec)
    attach(model, checked.adapter, torch.float32)
    return [name for name, _ in model.named_parameters()]


DEEP = replace(TINY, layers=4, tied=True)
MIXTURES = {
    "stages": (2, Layout(pipeline=2, micro_batch=2)),
    "stages-2bw": (2, Layout(pipeline=2, schedule="2bw", micro_batch=2)),
    "stages-tensor": (4, Layout(pipeline=2, tensor=2, micro_batch=2)),
    "stages-tensor-whole": (4, Layout(pipeline=2, tensor=2, micro_batch=2, sequence_parallel=False)),
    "stages-zero-1": (4, Layout(pipeline=2, data=2, zero=1, micro_batch=2)),
    "stages-tensor-zero-1": (8, Layout(pipeline=2, tensor=2, data=2, zero=1, micro_batch=1)),
    "hybrid-tensor": (8, Layout(data=4, zero=3, shard_inside=2, tensor=2, micro_batch=1)),
}


@sampled(2)
@pytest.mark.parametrize("name", covering(MIXTURES, costly=above_four_ranks))
def test_mixtures_pass(group: Make, name: str) -> None:
    world, layout = MIXTURES[name]
    spec = DEEP if layout.pipeline > 1 else replace(DEEP, layers=2)
    verdict = group(world).run(judge, CheckTarget(spec, layout, passes=2))[0]
    assert verdict.same, verdict.first
    assert verdict.ranks == world


@pytest.mark.parametrize("tied", [True, thorough(False)])
def test_stages_update_uneven_shards(group: Make, tied: bool) -> None:
    """A vocabulary that data ranks do not share evenly, in the embedding and the head of the two ends."""
    spec = replace(DEEP, tied=tied, vocab_size=97)
    verdict = group(4).run(judge, CheckTarget(spec, MIXTURES["stages-zero-1"][1], passes=2))[0]
    assert verdict.same, verdict.first


@contextmanager
def only_the_first_rank(name: str) -> Iterator[None]:
    """The optimizer's `name` is for the first rank, which has the truth too, and nothing for the others."""
    changed = patch.object(optimizer, name, lambda *given, **options: None)
    with changed if dist.get_rank() else patch.object(sys, "argv", sys.argv):
        yield


@pytest.mark.parametrize("layout", [TENSOR, REPLICAS, SHARDS], ids=["tensor", "ddp", "zero-3"])
def test_pruning_is_checked_where_a_job_prunes(group: Make, layout: Layout) -> None:
    """L1, and zeros that stay: a job's settings, which ranks and single process have alike."""
    pruned = target(layout, settings=SETTINGS.model_copy(update={"l1": 0.3, "keep_zeros": True}))
    for fault in (None, "no shrinking", "no zeros kept"):
        verdict = group(2).run(judge, pruned, fault)[0]
        assert verdict.same == (fault is None), (fault, verdict.first)
        if verdict.first is not None:
            assert verdict.first.kind == ("copy" if layout == REPLICAS else "weight")


@contextmanager
def tied_apart() -> Iterator[None]:
    with patch.object(pipeline.Pipeline, "_exchange_tied", lambda self: None):
        yield


def test_copies_that_do_not_meet_are_found(group: Make) -> None:
    """The first and the last stage each have a copy of a tied embedding, and forget to add their gradients."""
    verdict = group(2).run(judge, CheckTarget(DEEP, MIXTURES["stages"][1], passes=4), "tied apart")[0]
    assert verdict.first is not None
    assert (verdict.first.kind, verdict.first.name) == ("gradient", "embed.weight")


def test_a_stale_copy_of_a_tied_embedding_is_found(group: Make) -> None:
    """On the last stage, of which nothing else is compared before the next step."""
    verdict = group(2).run(judge, CheckTarget(DEEP, MIXTURES["stages"][1], passes=4), "stale embedding")[0]
    assert verdict.first is not None
    assert verdict.first.sentence() == "step 1: the copy of embed.weight on rank 1 is not what other ranks hold"


@contextmanager
def no_partial_sums() -> Iterator[None]:
    with patch.object(step, "sum_partial_gradients", lambda model: None):
        yield


@contextmanager
def no_sum_in_backward() -> Iterator[None]:
    with patch.object(tensor, "copy_to_ranks", lambda x, group: x):
        yield


@contextmanager
def scatter_without_sum() -> Iterator[None]:
    """Backward of what was gathered: each rank takes its own part of the gradient instead of everybody's."""

    def all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return conjugate._Conjugate.apply(x, group, conjugate._all_gather, conjugate._own_tokens)

    with patch.object(tensor, "all_gather", all_gather):
        yield


@contextmanager
def blocks_twice_as_large() -> Iterator[None]:
    original = tensor.Exchange.leave
    with patch.object(tensor.Exchange, "leave", lambda self, y, bias: original(self, y, bias) * 2):
        yield


@contextmanager
def averages() -> Iterator[None]:
    original = data._sum_hook

    def averaged(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return original(group, bucket).then(lambda made: made.value() / group.size())

    with patch.object(data, "_sum_hook", averaged):
        yield


@contextmanager
def no_reduction() -> Iterator[None]:
    def kept(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    with patch.object(data, "_sum_hook", kept):
        yield


@contextmanager
def divided_shards() -> Iterator[None]:
    original = FSDPModule.set_gradient_divide_factor
    with patch.object(FSDPModule, "set_gradient_divide_factor", lambda module, _: original(module, 2.0)):
        yield


@contextmanager
def groups_apart() -> Iterator[None]:
    """FSDP2 reduces inside groups and then forgets to add up what they have."""
    collectives = sys.modules["torch.distributed.fsdp._fully_shard._fsdp_collectives"]
    forgetful = SimpleNamespace(**{**vars(dist), "all_reduce": lambda *arguments, **options: None})
    with patch.object(collectives, "dist", forgetful):
        yield


@contextmanager
def own_tokens_only() -> Iterator[None]:
    with patch.object(Ranks, "sum", lambda ranks, tensor: tensor):
        yield


@contextmanager
def copies_counted_twice() -> Iterator[None]:
    with patch.object(optimizer, "shard_count", lambda parameter, split: dist.get_world_size()):
        yield


@contextmanager
def stale(name: str) -> Iterator[None]:
    """The second rank forgets to update its part of one weight, or its copy."""
    original = optimizer.MasterAdamW.step

    def forgetful(self: optimizer.MasterAdamW, *arguments: Any) -> None:
        named = {n: p for bucket in self.buckets for n, p in zip(bucket.names, bucket.parameters, strict=True)}
        weight = local(named[name])
        before = weight.clone()
        original(self, *arguments)
        if dist.get_rank() == 1:
            weight.copy_(before)

    with patch.object(optimizer.MasterAdamW, "step", torch.no_grad()(forgetful)):
        yield


FAULTS: dict[str, Callable[[], Any]] = {
    "no partial sums": no_partial_sums,
    "no sum in backward": no_sum_in_backward,
    "scatter without sum": scatter_without_sum,
    "blocks twice as large": blocks_twice_as_large,
    "averages": averages,
    "no reduction": no_reduction,
    "divided shards": divided_shards,
    "groups apart": groups_apart,
    "own tokens only": own_tokens_only,
    "copies counted twice": copies_counted_twice,
    "stale shard": partial(stale, "layers.1.mlp.up.weight"),
    "stale norm": partial(stale, "norm.weight"),
    "stale embedding": partial(stale, "embed.weight"),
    "tied apart": tied_apart,
    "no shrinking": partial(only_the_first_rank, "_shrink"),
    "no zeros kept": partial(only_the_first_rank, "_keep_zeros"),
}
FOUND = [
    ("no partial sums", TENSOR, "gradient", "norm.weight"),
    ("no partial sums", WHOLE_STREAM, "gradient", "layers.1.attention.k_norm.weight"),
    ("no sum in backward", WHOLE_STREAM, "gradient", "norm.weight"),
    ("scatter without sum", TENSOR, "gradient", "norm.weight"),
    ("blocks twice as large", WHOLE_STREAM, "loss", ""),
    ("averages", REPLICAS, "gradient", "head.weight"),
    ("no reduction", REPLICAS, "gradient", "head.weight"),
    ("divided shards", SHARDS, "gradient", "head.weight"),
    ("own tokens only", SHARDS, "loss", ""),
    ("copies counted twice", TENSOR, "norm", ""),
    ("stale shard", TENSOR, "weight", "layers.1.mlp.up.weight"),
    ("stale shard", SHARDS, "weight", "layers.1.mlp.up.weight"),
    ("stale shard", REPLICAS, "copy", "layers.1.mlp.up.weight"),
    ("stale norm", TENSOR, "copy", "norm.weight"),
]


@sampled(2)
@pytest.mark.parametrize(("fault", "layout", "kind", "name"), FOUND)
def test_a_fault_is_found_where_it_is(group: Make, fault: str, layout: Layout, kind: str, name: str) -> None:
    verdict = group(2).run(judge, target(layout), fault)[0]
    assert verdict.first is not None
    assert (verdict.first.step, verdict.first.kind, verdict.first.name) == (1, kind, name)
    assert verdict.first.error > 10 * TOLERANCE
    assert verdict.first.layer == (int(name.split(".")[1]) if name.startswith("layers.") else None)
    assert not verdict.same


def test_a_verdict_is_a_sentence_of_the_documentation(group: Make) -> None:
    verdict = group(2).run(judge, target(WHOLE_STREAM), "no partial sums")[0]
    assert verdict.first is not None
    page = Path(__file__).parents[2] / "docs" / "parallel.md"
    assert f"different: {verdict.first.sentence()}" in page.read_text(encoding="utf-8")


def test_the_verb_ends_with_one_where_ranks_differ(group: Make, tmp_path: Path) -> None:
    """And names what differs first. The verdict is a real one; only its processes were started elsewhere."""
    job, checked = tmp_path / "job.yaml", target(TENSOR)
    job.write_text("model: tiny-llama\ndata: notes.txt\noutput: out\nsteps: 1\nlayout: {tensor: 2}\n")
    verdict = group(2).run(judge, checked, "stale shard")[0]
    with patch.object(gate, "check", lambda *_, **__: (verdict, checked)):
        told = CliRunner().invoke(app, ["check", str(job)])
    assert told.exit_code == 1
    assert "different: step 1: weight of layers.1.mlp.up.weight (layer 1)" in " ".join(told.output.split())


def test_what_cannot_be_split_is_refused_and_not_shrunk(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("model: gpt2-xl\ndata: notes.txt\noutput: out\nsteps: 1\nlayout: {tensor: 2}\n")
    with pytest.raises(UserError, match="has 25 attention heads"):
        check(target_of(read_question(job)), str(job))
    job.write_text("model: gpt2-xl\ndata: notes.txt\noutput: out\nsteps: 1\n")
    with pytest.raises(UserError, match="has one rank, which has nothing to differ from"):
        check(target_of(read_question(job)), str(job))


def test_groups_that_do_not_meet_are_found(group: Make) -> None:
    assert group(4).run(judge, target(HYBRID))[0].same
    verdict = group(4).run(judge, target(HYBRID), "groups apart")[0]
    assert verdict.first is not None
    assert (verdict.first.kind, verdict.first.name) == ("gradient", "head.weight")


GRID = Layout(tensor=2, data=2, zero=3, micro_batch=4)
SHRUNK = [
    thorough("llama-3.1-405b", GRID),
    thorough("qwen3-8b", GRID),
    ("gemma-2-9b", GRID),
    ("gpt2", GRID),
    thorough("mixtral-8x7b", GRID),
    ("qwen2.5-3b", Layout(tensor=4, micro_batch=4)),
]


@sampled(2)
@pytest.mark.parametrize(("name", "layout"), SHRUNK)
def test_a_miniature_keeps_what_can_go_wrong(group: Make, name: str, layout: Layout) -> None:
    large = CheckTarget(preset(name), layout, passes=2, length=4096)
    small = miniature(large)
    ours, theirs = small.spec, large.spec
    assert ours.params() < 100_000
    for field in ("family", "tied", "norm", "qk_norm", "gated", "qkv_bias", "sandwich_norms", "logit_softcap"):
        assert getattr(ours, field) == getattr(theirs, field)
    assert (ours.heads > ours.kv_heads) == (theirs.heads > theirs.kv_heads)
    assert (ours.kv_heads < layout.tensor) == (theirs.kv_heads < layout.tensor)
    assert (ours.experts is None) == (theirs.experts is None)
    assert ours.vocab_size % 2 == theirs.vocab_size % 2
    assert group(4).run(judge, small, None, 1)[0].same


SINKS = {
    "zero-3": SHARDS,
    "stages": Layout(pipeline=2, micro_batch=2),
    "tensor": Layout(tensor=2, micro_batch=2),
    "tensor-whole-stream": Layout(tensor=2, sequence_parallel=False, micro_batch=2),
    "heads": Layout(context=2, micro_batch=2),
    "ring": Layout(context=2, ring=2, zero=1, micro_batch=2),
    "experts": Layout(data=2, expert=2, micro_batch=2),
    "tensor-heads": Layout(tensor=2, context=2, micro_batch=2),
    "tensor-experts": Layout(data=2, expert=2, tensor=2, zero=1, micro_batch=2),
}


@sampled(4)
@pytest.mark.parametrize("name", covering(SINKS))
def test_attention_sinks_and_biased_experts_pass(group: Make, name: str) -> None:
    """gpt-oss over every kind of ranks: sinks by head, windows, biased experts, a clamped gate."""
    layout = SINKS[name]
    small = miniature(CheckTarget(preset("gpt-oss-20b"), layout, passes=2, length=4096))
    assert small.spec.sinks
    assert small.spec.window_layers
    verdict = group(layout.ranks).run(judge, small, None, 1)[0]
    assert verdict.same, verdict.first


@pytest.mark.usefixtures("server")
def test_the_verb_checks_adapters(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    fields = "model: tiny-llama\ndata: notes.txt\noutput: out\nsteps: 1\nadapter: {rank: 8, bits: 4, dropout: 0.1}\n"
    job.write_text(f"{fields}layout: {{data: 2, micro_batch: 4}}\n")
    done = CliRunner().invoke(app, ["check", str(job), "--tiny", "--steps", "1"])
    assert done.exit_code == 0, done.output
    assert "frozen, with adapters of rank 4" in " ".join(done.stdout.split())
    with pytest.raises(UserError, match=r"adapter.rank trains small matrices .* but layout.zero is 3"):
        check(target_of(read_question(job, ["layout.zero=3"])), str(job))


@pytest.mark.usefixtures("server")
def test_the_verb_starts_its_own_processes(tmp_path: Path) -> None:
    """Of the server that other tests fork from; test_launching.py has a program with a server of its own do it."""
    job = tmp_path / "job.yaml"
    job.write_text("model: tiny-llama\ndata: notes.txt\noutput: out\nsteps: 1\nlayout: {tensor: 2, micro_batch: 4}\n")
    done = CliRunner().invoke(app, ["check", str(job), "--tiny", "--steps", "1", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["same"] is True
    assert (told["ranks"], told["steps"], told["layout"]["tensor"]) == (2, 1, 2)
