"""Checkpoints move between layouts: saved in pieces by one, read by another to the same bits, states and masters too.

A ring of layouts: each one's run is read by the layouts after it, and what they hold then, written in one piece, is
what one process that read it holds. Every kind of split is on both sides: data (whole, sharded, in groups), tensor,
stages under every order of work, meshes, context, experts; states and weights on hosts; updates inside backward and
pipelines without a flush, which have states of their own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from tests.covering import sampled, thorough
from tests.distributed.group import Group
from tests.distributed.test_checkpoints import rewritten, run_on
from tests.train.jobs import tiny_job
from tightfit.jobs.job import Job
from tightfit.models.resolve import checkpoints_of
from tightfit.train.optimizer.adamw import OLDER_WEIGHTS, PREVIOUS_NORMS

Make = Callable[[int], Group]
MASTERS = "optimizer/master/"
OLDER = f"optimizer/{OLDER_WEIGHTS}"
SMALL: dict[str, Any] = {"source": "tiny-llama", "shape": {"layers": 4, "hidden_size": 32, "mlp_size": 48}}
ROUTED = {"source": "tiny-mixtral", "shape": {"layers": 2, "hidden_size": 32}}
HOST = {"offload": "optimizer"}
SHARDS_ON_HOST = {"offload": "weights"}
EARLY = {"update_in_backward": True}
Way = tuple[dict[str, Any], dict[str, Any]]
DENSE: dict[str, Way] = {
    "hybrid": ({"data": 4, "zero": 3, "shard_inside": 2}, {}),
    "tensor, states on hosts": ({"tensor": 2, "data": 2, "zero": 2}, HOST),
    "stages": ({"pipeline": 2, "data": 2, "zero": 1}, {}),
    "context": ({"context": 2, "data": 2, "zero": 3}, HOST),
    "shards on hosts": ({"data": 4, "zero": 3}, SHARDS_ON_HOST),
    "tensor and stages": ({"tensor": 2, "pipeline": 2}, {}),
    "early updates": ({"tensor": 2, "data": 2, "zero": 3}, EARLY | SHARDS_ON_HOST),
    "replicas": ({"data": 4}, {}),
    "interleaved": ({"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2}, {}),
    "two versions": ({"pipeline": 2, "schedule": "2bw", "tensor": 2}, {}),
    "in a V": ({"pipeline": 2, "schedule": "zb-v", "stages_per_rank": 2, "data": 2, "zero": 1}, {}),
    "four stages without a flush": ({"pipeline": 4, "schedule": "2bw"}, {}),
    "stages of meshes": ({"pipeline": 2, "tensor": 4, "tensor_mesh": "2d", "micro_batch": 2}, {}),
    "pieces of rows on meshes": (
        {"context": 2, "zero": 1, "tensor": 4, "tensor_mesh": "2d", "micro_batch": 2},
        {},
    ),
    "interleaved in four": ({"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2, "data": 2}, {}),
}
EXPERTS: dict[str, Way] = {
    "experts of replicas": ({"data": 4, "expert": 2}, {}),
    "experts": ({"data": 4, "zero": 3, "expert": 2}, HOST),
    "experts on hosts": ({"data": 4, "zero": 2, "expert": 4}, SHARDS_ON_HOST),
    "tensor": ({"tensor": 2, "data": 2, "zero": 1, "expert": 2}, {}),
    "stages": ({"pipeline": 2, "data": 2}, {}),
    "pieces of rows": ({"data": 2, "context": 2, "expert": 4}, {}),
    "fewer experts than pieces": ({"context": 4, "expert": 2}, {}),
}


@pytest.fixture
def make(tmp_path: Path, corpus: Path, token_cache: Path) -> Callable[..., Job]:
    def made(name: str, way: Way = ({}, {}), **more: Any) -> Job:
        layout, levers = {"micro_batch": 1} | way[0], way[1]
        fields: dict[str, Any] = {"layout": layout, "levers": levers, "optimizer": {"lr": 1e-3}, "steps": 1}
        fields |= {"saving": {}, "evaluation": {"max_rows": 1}, "global_batch": 4, "precision": "bf16"}
        if levers.get("update_in_backward"):
            layout["micro_batch"] = 4 // layout["data"]
        return tiny_job(tmp_path / name, corpus, token_cache, **(fields | more))

    return made


def tensors(files: dict[str, bytes]) -> dict[str, tuple[torch.dtype, bytes]]:
    """Weights and states to the bit, without what others do not have: the norms that updates inside backward clip by,
    and the older weights of pipelines without a flush."""
    named = load(files["model.safetensors"]) | load(files["training/state.safetensors"])
    return {
        name: (tensor.dtype, to_bytes(tensor))
        for name, tensor in named.items()
        if not (name.endswith(PREVIOUS_NORMS) or name.startswith(OLDER))
    }


def to_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def neighbours(ways: dict[str, Way]) -> list[Any]:
    """Each layout and the next; `make test` runs a ring's first pair, and others in test_checkpoints.py and
    test_offload_runs.py."""
    names = list(ways)
    pairs = [(ways, name, names[(number + 1) % len(names)]) for number, name in enumerate(names)]
    return [thorough(*pair) if number else pair for number, pair in enumerate(pairs)]


@sampled(4)
@pytest.mark.parametrize(("ways", "writer", "reader"), [*neighbours(DENSE), *neighbours(EXPERTS)])
def test_each_layout_reads_what_another_wrote(
    group: Make, make: Callable[..., Job], ways: dict[str, Way], writer: str, reader: str
) -> None:
    """Several ranks write pieces by themselves: nobody has all of a model in memory."""
    fields: dict[str, Any] = {"model": ROUTED, "precision": "fp32"} if ways is EXPERTS else {"model": SMALL}
    run_on(group, make("run", ways[writer], **fields))
    assert (checkpoints_of(make("run").output)[-1] / "sharded").is_dir()
    expected = rewritten(group, make("run", **fields), make("by one").output)
    found = rewritten(group, make("run", ways[reader], **fields), make("by another").output)
    ours, theirs = tensors(found), tensors(expected)
    assert ours.keys() == theirs.keys()
    assert [each for each in theirs if ours[each] != theirs[each]] == []


TWO_VERSIONS = {"pipeline": 2, "schedule": "2bw"}


@pytest.mark.parametrize("reader", [{"pipeline": 4}, thorough({"tensor": 2}), thorough({"data": 2})])
def test_both_versions_of_weights_move_to_other_stages(
    group: Make, make: Callable[..., Job], reader: dict[str, Any]
) -> None:
    """After an update the older weights are others than the newest, and as much a part of the run."""
    fields: dict[str, Any] = {"model": SMALL, "steps": 2}
    run_on(group, make("run", (TWO_VERSIONS, {}), **fields))
    ways: list[Way] = [(TWO_VERSIONS, {}), (TWO_VERSIONS | reader, {})]
    expected, found = (
        load(rewritten(group, make("run", way, **fields), make(f"copy {at}").output)["training/state.safetensors"])
        for at, way in enumerate(ways)
    )
    older = [name for name in expected if name.startswith(OLDER)]
    assert len(older) == 3 + 9 * SMALL["shape"]["layers"]
    assert expected.keys() == found.keys()
    assert [name for name in expected if to_bytes(expected[name]) != to_bytes(found[name])] == []
    newest = {name: expected[name.replace(OLDER, MASTERS)].to(expected[name].dtype) for name in older}
    assert not any(expected[name].equal(newest[name]) for name in older if "norm" not in name), "an update apart"


@pytest.mark.parametrize(("before", "after"), [({}, EARLY), thorough(EARLY, {})])
def test_a_run_begins_or_ends_to_update_inside_backward(
    group: Make, make: Callable[..., Job], before: dict[str, Any], after: dict[str, Any]
) -> None:
    """Unclipped it makes no difference when weights are updated."""
    layout = {"data": 2, "zero": 3, "micro_batch": 2}
    fields = {"model": SMALL, "optimizer": {"lr": 1e-3, "clip_norm": 0.0}, "steps": 2, "precision": "fp32"}
    run_on(group, make("moving", (layout, before), **fields), stop_after=1)
    run_on(group, make("moving", (layout, after), **fields), resume=True)
    run_on(group, make("straight", (layout, {}), **fields))
    ours, theirs = (
        load(rewritten(group, make(name, **fields), make(f"copy {name}").output)["model.safetensors"])
        for name in ("moving", "straight")
    )
    for name, weight in theirs.items():
        assert (ours[name] - weight).norm() < 1e-5 * weight.norm(), name
