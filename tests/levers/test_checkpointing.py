"""Activation checkpointing changes memory, not numbers: every way of it, alone and together, to the bit."""

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.covering import sampled, thorough
from tests.distributed.training import GEMMA, GPT2, TIED
from tests.train.models import TINY, TINY_ROUTED, ragged_batch, tiny_model
from tightfit.errors import UserError
from tightfit.jobs.levers import Levers
from tightfit.levers.checkpointing import checkpoint_layers
from tightfit.levers.tiling import tile_layers
from tightfit.models.decoder import Decoder, Implementations
from tightfit.models.initialisation import init_weights
from tightfit.models.presets import preset
from tightfit.models.spec import ModelSpec
from tightfit.train.step import accumulate

CPU = torch.device("cpu")
LAYERS = 4
DENSE = replace(TINY, layers=LAYERS)
assert TINY_ROUTED.experts is not None
SHARED = replace(TINY_ROUTED.experts, shared_size=16, shared_gated=False)
"""Whose products follow those of the experts, which recomputation leaves out in part."""
SPECS = {
    "dense": DENSE,
    "tied": replace(TIED, layers=LAYERS),
    "routed": replace(TINY_ROUTED, layers=LAYERS),
    "shared": replace(TINY_ROUTED, layers=LAYERS, experts=SHARED),
    "biased experts": replace(preset("tiny-gpt-oss"), vocab_size=96),
    "gemma": replace(GEMMA, layers=LAYERS, window_layers=(0, 2)),
    "gpt2": replace(GPT2, layers=LAYERS),
}
KERNELS = Implementations(attention="triton", norm="triton", rope="triton", glu="triton")
ALL: dict[str, Any] = {"checkpoint_every": 1}
OFFLOADED = ALL | {"offload_checkpoints": True}
INPUT_BYTES = 4 * 16 * 32 * 4
LEVERS: dict[str, dict[str, Any]] = {
    "all": ALL,
    "every second": {"checkpoint_every": 2},
    "three": {"num_checkpoints": 3},
    "keep attention": ALL | {"checkpoint_keep": "attention"},
    "keep matmuls": ALL | {"checkpoint_keep": "matmuls"},
    "three keep matmuls": {"num_checkpoints": 3, "checkpoint_keep": "matmuls"},
    "offload": OFFLOADED,
    "offload two": OFFLOADED | {"checkpoint_host_bytes": 2 * INPUT_BYTES},
    "offload none": OFFLOADED | {"checkpoint_host_bytes": INPUT_BYTES - 1},
    "offload, keep attention": OFFLOADED | {"checkpoint_keep": "attention"},
    "offload, keep matmuls": OFFLOADED | {"checkpoint_keep": "matmuls"},
    "offload three": {"num_checkpoints": 3, "offload_checkpoints": True},
    "budget": {"checkpoint_budget_bytes": 16 * INPUT_BYTES},
    "budget, offload": {"checkpoint_budget_bytes": 16 * INPUT_BYTES, "offload_checkpoints": True},
}
EVERY_FAMILY = ("all", "keep attention", "keep matmuls", "offload, keep matmuls", "budget", "budget, offload")
"""Where it matters what a layer computes; the others only choose among layers, which one family shows."""
AGAIN_FROM_THE_HOST = ("keep matmuls", "budget")
"""Also there with inputs that come back from the host, of which layers compute the same again."""

Gradients = tuple[Tensor, dict[str, Tensor]]


def gradients(model: Decoder, rounds: int = 1) -> Gradients:
    """Of two packed micro-batches, the second of which finds host buffers used."""
    for _ in range(rounds):
        model.zero_grad()
        loss, _ = accumulate(model, [ragged_batch(4, seed=seed) for seed in range(2)], CPU)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(model.parameters()))
    return loss, found


@cache
def plain(spec: ModelSpec, tiles: int = 1) -> Gradients:
    """Loss and gradients without any lever, or with tiles alone."""
    model = tiny_model(spec)
    if tiles > 1:
        tile_layers(model, Levers(tiles=tiles))
    return gradients(model)


def assert_same(found: Gradients, expected: Gradients) -> None:
    assert torch.equal(found[0], expected[0])
    for name, gradient in found[1].items():
        assert torch.equal(gradient, expected[1][name]), name


def ways(kind: str) -> list[Any]:
    """What each kind of model is trained with."""
    if kind == "dense":
        return [(kind, name) for name in LEVERS]
    return [thorough(kind, name) if name in AGAIN_FROM_THE_HOST else (kind, name) for name in EVERY_FAMILY]


@sampled(5)
@pytest.mark.parametrize(("kind", "name"), [way for kind in SPECS for way in ways(kind)])
def test_loss_and_gradients_are_bit_identical(kind: str, name: str) -> None:
    """Of dense models in a second step as well, which begins where the first left its buffers."""
    model = tiny_model(SPECS[kind])
    checkpoint_layers(model, Levers.model_validate(LEVERS[name]))
    assert_same(gradients(model, rounds=2 if kind == "dense" else 1), plain(SPECS[kind]))


def with_kernels(spec: ModelSpec, levers: dict[str, Any]) -> Decoder:
    """The decoder on the operators a GPU runs, two layers of it."""
    torch.manual_seed(0)
    model = Decoder(replace(spec, layers=2), KERNELS)
    checkpoint_layers(model, Levers.model_validate(levers))
    return model


@cache
def kernels_gradients(kind: str, name: str) -> list[Tensor | None]:
    tokens = torch.randint(0, 96, (1, 8), generator=torch.Generator().manual_seed(0))
    model = with_kernels(SPECS[kind], LEVERS.get(name, {}))
    init_weights(model)
    model(tokens, tokens).loss.backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("dense", "keep attention"), ("dense", "offload, keep matmuls"), thorough("shared", "keep matmuls")],
)
def test_kernels_operators_are_bit_identical(kind: str, name: str) -> None:
    """On a row of eight tokens, as the interpreter is slow."""
    found, expected = kernels_gradients(kind, name), kernels_gradients(kind, "")
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@sampled(4)
@pytest.mark.parametrize("name", ["all", "keep attention", "offload, keep attention", "budget"])
@pytest.mark.parametrize("kind", ["dense", "gemma"])
def test_tiled_layers_are_bit_identical(kind: str, name: str) -> None:
    levers = Levers.model_validate(LEVERS[name] | {"tiles": 3})
    model = tiny_model(SPECS[kind])
    tile_layers(model, levers)
    checkpoint_layers(model, levers)
    assert_same(gradients(model), plain(SPECS[kind], levers.tiles))


class Counting(TorchDispatchMode):
    """How often each operation is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name.partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


def counts(levers: dict[str, Any], spec: ModelSpec = DENSE) -> Counter[str]:
    """In one step on fake tensors, which compute nothing."""
    with FakeTensorMode(), Counting() as counting:
        tokens = torch.zeros(4, 16, dtype=torch.long)
        with_kernels(spec, levers)(tokens, tokens).loss.backward()
    return counting.counts


def test_what_is_kept_is_not_computed_again() -> None:
    """Per layer there are seven products; the last is never computed again, nor is its activation."""
    none, nothing, attention, matmuls = (
        counts(levers) for levers in ({}, ALL, LEVERS["keep attention"], LEVERS["keep matmuls"])
    )
    assert [each["flash_attention"] for each in (none, nothing, attention, matmuls)] == [2, 4, 2, 2]
    assert [each["mm"] - none["mm"] for each in (nothing, attention, matmuls)] == [12, 12, 0]
    assert [each["rope"] - none["rope"] for each in (nothing, attention, matmuls)] == [2, 2, 2]
    assert [each["glu"] - none["glu"] for each in (nothing, attention, matmuls)] == [0, 0, 0]


def test_a_norm_after_the_last_product_has_it_computed_again() -> None:
    gemma = replace(SPECS["gemma"], attention_softcap=None)
    none, nothing, matmuls = (counts(levers, gemma) for levers in ({}, ALL, LEVERS["keep matmuls"]))
    assert nothing["mm"] - none["mm"] == 14
    assert matmuls["mm"] == none["mm"]


@cache
def with_dropout(name: str) -> Gradients:
    model = tiny_model(DENSE)
    for layer in model.layers:
        layer.mlp.register_forward_pre_hook(lambda _, given: (F.dropout(given[0], 0.5),))
    checkpoint_layers(model, Levers.model_validate(LEVERS.get(name, {})))
    torch.manual_seed(3)
    return gradients(model)


@pytest.mark.parametrize("name", ["all", "keep attention", "offload, keep matmuls", "budget"])
def test_random_numbers_are_those_of_the_first_time(name: str) -> None:
    found = with_dropout(name)
    assert_same(found, with_dropout(""))
    assert not torch.equal(found[0], plain(DENSE)[0]), "nothing was dropped"


@pytest.mark.parametrize("name", ["all", "keep matmuls", "offload, keep attention"])
def test_a_graph_can_be_gone_through_twice(name: str) -> None:
    batch = ragged_batch(4)
    found = []
    for levers in (LEVERS[name], {}):
        model = tiny_model(DENSE)
        checkpoint_layers(model, Levers.model_validate(levers))
        loss = model(batch["tokens"], batch["labels"]).loss
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_evaluation_of_more_rows_than_a_budget_holds_is_not_refused() -> None:
    model, batch = tiny_model(DENSE), ragged_batch(4)
    checkpoint_layers(model, Levers(checkpoint_budget_bytes=INPUT_BYTES))
    with pytest.raises(UserError, match="checkpoint_budget_bytes"):
        model(batch["tokens"], batch["labels"])
    with torch.no_grad():
        assert model(batch["tokens"], batch["labels"]).loss > 0


def test_nothing_is_kept_where_no_gradients_are_wanted() -> None:
    model = tiny_model(DENSE)
    checkpoint_layers(model, Levers.model_validate(LEVERS["offload, keep matmuls"]))
    batch = ragged_batch(4)
    with torch.no_grad(), Counting() as counting:
        loss = model(batch["tokens"], batch["labels"], documents=batch["documents"]).loss
    assert torch.equal(loss, tiny_model(DENSE)(batch["tokens"], batch["labels"], documents=batch["documents"]).loss)
    assert not counting.counts["copy_"]


@pytest.mark.parametrize(
    ("levers", "words"),
    [
        ({"checkpoint_every": 1, "num_checkpoints": 2}, ["num_checkpoints is 2", "leave one"]),
        ({"checkpoint_budget_bytes": 1, "checkpoint_every": 1}, ["checkpoint_budget_bytes", "leave"]),
        ({"checkpoint_budget_bytes": 1, "checkpoint_keep": "matmuls"}, ["checkpoint_budget_bytes", "leave"]),
        ({"checkpoint_keep": "attention"}, ["checkpoint_keep is attention", "checkpoint_every=1"]),
        ({"checkpoint_every": 1, "checkpoint_keep": "matmuls", "tiles": 2}, ["tiles", "attention"]),
        ({"offload_checkpoints": True}, ["offload_checkpoints", "set it to 1"]),
        ({"checkpoint_every": 1, "checkpoint_host_bytes": 1}, ["checkpoint_host_bytes", "offload_checkpoints"]),
        ({"checkpoint_every": 1, "checkpoint_format": "fp8"}, ["checkpoint_format", "offload_checkpoints"]),
        (
            {"checkpoint_budget_bytes": 1, "offload_checkpoints": True, "checkpoint_host_bytes": 1},
            ["checkpoint_budget_bytes", "checkpoint_host_bytes out"],
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(levers: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        Levers.model_validate(levers)
    assert all(word in str(caught.value) for word in words)


def test_more_checkpoints_than_layers_get_a_sentence() -> None:
    model = tiny_model(DENSE)
    checkpoint_layers(model, Levers(num_checkpoints=5))
    with pytest.raises(UserError, match="num_checkpoints is 5, but the model has 4 layers"):
        accumulate(model, [ragged_batch(4)], CPU)
