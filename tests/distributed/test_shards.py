"""Shards are filled from whole tensors without a word between ranks, and gathered back to the same bits."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.covering import sampled
from tests.distributed.group import Group
from tests.distributed.parts import Parts, held, united
from tests.distributed.training import CPU, PLAIN, SETTINGS, TIED, UNEVEN, Case, build, mesh_of, parameters
from tests.train.models import TINY, TINY_ROUTED, tiny_model
from tightfit.collectives.shards import copy_whole, is_shard, like_shard, local, whole
from tightfit.models.huggingface.weights import load_weights, save_weights
from tightfit.models.spec import ModelSpec
from tightfit.parallel import gathering
from tightfit.parallel.ranks import Ranks
from tightfit.train.assembly import assemble, unfilled

Make = Callable[[int], Group]
ODD = replace(TINY, vocab_size=97, hidden_size=34, mlp_size=66)
SPECS = {"dense": TINY, "tied": TIED, "routed": TINY_ROUTED, "odd": ODD}


@sampled(4)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", SPECS)
def test_weights_of_a_file_reach_the_rank_that_holds_them(group: Make, tmp_path: Path, name: str, world: int) -> None:
    model = tiny_model(SPECS[name], seed=3)
    save_weights(model, tmp_path)
    found = group(world).run(load_sharded, SPECS[name], world, str(tmp_path))
    expected = {name: p.detach() for name, p in model.named_parameters()}
    for loaded in found:
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], weight) for name, weight in expected.items())


def load_sharded(spec: ModelSpec, world: int, folder: str) -> dict[str, Tensor]:
    case = Case(spec=spec, data=world, zero=3)
    decoder = unfilled(spec, case.layout, "bf16", CPU)
    mesh = mesh_of(case.layout)
    assemble(decoder, mesh, case.layout, PLAIN, "bf16", SETTINGS, CPU, lambda model: load_weights(model, Path(folder)))
    assert (decoder.head.weight is decoder.embed.weight) == spec.tied
    assert all(is_shard(p) and p.dtype == torch.float32 for p in decoder.parameters())
    return {name: whole(p).detach() for name, p in decoder.named_parameters()}


CUT = {
    "shards": Case(spec=UNEVEN, data=4, zero=3),
    "shards inside groups": Case(spec=UNEVEN, data=4, zero=2, shard_inside=2),
    "tensor": Case(spec=replace(ODD, kv_heads=4, mlp_size=68), tensor=4),
    "tensor and shards": Case(spec=replace(ODD, tied=True), tensor=2, data=2, zero=3),
}


@sampled(3)
@pytest.mark.parametrize("name", CUT)
def test_parts_lie_where_torch_gathers_them_from(group: Make, name: str) -> None:
    """Other tests, and the equivalence gate, put parts together by their places; torch's gathering is the reference."""
    answers = group(4).run(parts_and_wholes, CUT[name])
    found = united([parts for parts, _, _ in answers])
    assert len(found) > 10
    assert answers[0][2].keys() == found.keys()
    assert all(torch.equal(answers[0][2][name], weight) for name, weight in found.items())
    for rank, (_, gathered, here) in enumerate(answers):
        assert gathered.keys() == found.keys()
        assert all(torch.equal(found[name], weight) for name, weight in gathered.items())
        assert rank == 0 or set(here.values()) == {None}


def parts_and_wholes(case: Case) -> tuple[Parts, dict[str, Tensor], dict[str, Tensor | None]]:
    mesh = mesh_of(case.layout)
    named = parameters(build(case, mesh)[0])
    narrow = {name: tensor.bfloat16() if "norm" in name else tensor for name, tensor in named.items()}
    with patch.object(gathering, "BATCH_BYTES", 20_000):
        here = dict(gathering.gather_to_first(narrow, Ranks.of(mesh)))
    return held(narrow), {name: whole(tensor) for name, tensor in narrow.items()}, here


def test_parts_that_are_missing_or_not_alike_are_found() -> None:
    """Which no comparison of what was put together would show."""
    row = torch.arange(4.0)
    upper, other = Parts([("x", torch.Size((2, 4)), ((0, 1), (0, 4)), row.dtype)], {row.dtype: row}), held({"x": row})
    lower = replace(upper, entries=[("x", torch.Size((2, 4)), ((1, 1), (0, 4)), row.dtype)])
    assert united([upper, lower, upper])["x"].tolist() == [[0, 1, 2, 3]] * 2
    for parts, words in (
        ([upper], "no rank has some elements"),
        ([upper, lower, replace(upper, values={row.dtype: -row})], "ranks differ in x"),
        ([upper, other], "x of rank 1 is"),
    ):
        with pytest.raises(AssertionError, match=words):
            united(parts)


def test_rows_are_copied_where_they_are(group: Make) -> None:
    assert group(4).run(copy_rows) == [True] * 4


def copy_rows() -> bool:
    """Nine rows over four ranks: three each, and none for the last."""
    case = Case(spec=replace(TINY, vocab_size=9), data=4, zero=3)
    decoder, _, _ = build(case, mesh_of(case.layout))
    target, values = decoder.embed.weight, torch.arange(9 * 32.0).view(9, 32)
    assert is_shard(target)
    copy_whole(target, values)
    assert torch.equal(whole(target), values)
    copy_whole(target, -values[4], 4)
    expected = values.clone()
    expected[4] *= -1
    assert torch.equal(whole(target), expected)
    doubled = like_shard(local(target) * 2, target)
    return torch.equal(whole(doubled), expected * 2)
