"""Checkpointing on the GPU in bf16: the same numbers to the bit, memory falls as expected, inputs on the host."""

import gc
from collections import Counter
from typing import Any

import pytest
import torch

from tightfit.jobs.levers import Levers
from tightfit.levers import checkpoint_keep
from tightfit.levers.checkpointing import checkpoint_layers
from tightfit.memory.host import pinned_bytes
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.spec import Experts, ModelSpec
from tightfit.train.step import accumulate

CUDA = torch.device("cuda")
LENGTH, LAYERS = 2048, 4
SPEC = ModelSpec(
    family="llama",
    vocab_size=1024,
    hidden_size=512,
    layers=LAYERS,
    heads=8,
    kv_heads=2,
    head_dim=64,
    mlp_size=1536,
    max_positions=4096,
)
ROUTED = ModelSpec(
    family="mixtral",
    vocab_size=1024,
    hidden_size=512,
    layers=LAYERS,
    heads=8,
    kv_heads=2,
    head_dim=64,
    mlp_size=1024,
    max_positions=4096,
    experts=Experts(count=4, per_token=2, mlp_size=512, balance_weight=0.01),
)
STREAM = LENGTH * 512 * 2
NUMBERS = 64
"""More bytes than single numbers take that are pinned to be sent."""
ALL: dict[str, Any] = {"checkpoint_every": 1}
LEVERS: list[dict[str, Any]] = [
    ALL,
    {"num_checkpoints": 3},
    ALL | {"checkpoint_keep": "attention"},
    ALL | {"checkpoint_keep": "matmuls"},
    ALL | {"offload_checkpoints": True},
    ALL | {"offload_checkpoints": True, "checkpoint_host_bytes": STREAM},
    ALL | {"checkpoint_keep": "attention", "offload_checkpoints": True},
    {"checkpoint_budget_bytes": 40 * 2**20},
    {"checkpoint_budget_bytes": 40 * 2**20, "offload_checkpoints": True},
]


def decoder(spec: ModelSpec, levers: dict[str, Any]) -> Decoder:
    torch.manual_seed(0)
    with CUDA:
        model = Decoder(spec)
    init_weights(model)
    model = model.to(torch.bfloat16)
    checkpoint_layers(model, Levers.model_validate(levers))
    return model


def batches(count: int, packed: bool) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 1024, (count, 1, LENGTH), generator=generator)
    documents = (torch.arange(LENGTH)[None] >= LENGTH // 3).int()
    more = {"documents": documents} if packed else {}
    return [{"tokens": each, "labels": each.roll(-1, 1), **more} for each in tokens]


def trained(spec: ModelSpec, levers: dict[str, Any], packed: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of a second step of two micro-batches: buffers and the allocator's blocks are used again."""
    model = decoder(spec, levers)
    for _ in range(2):
        model.zero_grad()
        loss, _ = accumulate(model, batches(2, packed), CUDA)
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def deterministic() -> Any:
    """cuDNN's attention sums dQ in any order; ours does not."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("levers", LEVERS, ids=lambda levers: "-".join(f"{value}" for value in levers.values()))
def test_loss_and_gradients_are_bit_identical(levers: dict[str, Any], packed: bool) -> None:
    (loss, gradients), (expected_loss, expected) = trained(SPEC, levers, packed), trained(SPEC, {}, packed)
    assert torch.equal(loss, expected_loss)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("levers", [LEVERS[3], LEVERS[6]], ids=["matmuls", "offload"])
def test_routed_layers_are_bit_identical(levers: dict[str, Any]) -> None:
    (loss, gradients), (expected_loss, expected) = trained(ROUTED, levers, False), trained(ROUTED, {}, False)
    assert torch.equal(loss, expected_loss)
    for name, gradient in gradients.items():
        if "experts" in name or "router" in name:  # index_add's own gradient is summed in any order upstream of these
            assert torch.allclose(gradient, expected[name], rtol=1e-2, atol=1e-5), name


@pytest.mark.parametrize(("keep", "products"), [("attention", 0), ("matmuls", 6)])
def test_torchs_attention_is_kept(keep: str, products: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever kernel torch takes, its result is handed out once per layer; and so are all products but the last."""
    handed: Counter[str] = Counter()

    class Counting(checkpoint_keep._ReplayResults):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            before = len(self.results)
            made = super().__torch_dispatch__(func, types, args, kwargs)
            handed[func._schema.name] += before - len(self.results)
            return made

    monkeypatch.setattr(checkpoint_keep, "_ReplayResults", Counting)
    accumulate(decoder(SPEC, ALL | {"checkpoint_keep": keep}), batches(1, packed=False), CUDA)
    assert sum(count for name, count in handed.items() if "_scaled_dot_product_" in name) == LAYERS
    assert handed["aten::mm"] == products * LAYERS


def peak(levers: dict[str, Any]) -> tuple[int, int]:
    """The most allocated in a second step, and what is allocated between forward and backward, beyond the weights."""
    model = decoder(SPEC, levers)
    batch = {name: value.to(CUDA) for name, value in batches(1, packed=False)[0].items()}
    for _ in range(2):
        model.zero_grad()
        torch.cuda.synchronize()
        gc.collect()
        start = requested_bytes()
        torch.cuda.reset_peak_memory_stats()
        loss = model(batch["tokens"], batch["labels"]).loss
        between = requested_bytes() - start
        loss.backward()
        torch.cuda.synchronize()
        loss = None
    return requested_bytes("peak") - start, between


def requested_bytes(when: str = "current") -> int:
    """What tensors asked for; the blocks they were given may be larger."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{when}"])


def test_memory_falls_in_order() -> None:
    none, matmuls, attention, nothing, offloaded = (
        peak(levers) for levers in ({}, LEVERS[3], LEVERS[2], ALL, ALL | {"offload_checkpoints": True})
    )
    between = [found[1] for found in (none, matmuls, attention, nothing, offloaded)]
    assert between == sorted(between, reverse=True)
    assert len(set(between)) == 5
    assert nothing[1] - offloaded[1] == (LAYERS - 1) * STREAM
    assert none[0] > matmuls[0] > nothing[0] >= offloaded[0]


def test_host_buffers_are_made_once_and_given_back() -> None:
    gc.collect()
    before = pinned_bytes()
    model = decoder(SPEC, ALL | {"offload_checkpoints": True})
    there = [{name: values.cuda() for name, values in batch.items()} for batch in batches(2, packed=False)]
    held = []
    for _ in range(3):  # of tokens that are on the device: others are pinned to be sent, for as long as that takes
        accumulate(model, there, CUDA)
        held.append(pinned_bytes() - before)
    streams = (LAYERS - 1) * STREAM
    assert held == [held[0]] * 3
    assert streams <= held[0] < streams + NUMBERS
    del model
    gc.collect()
    assert pinned_bytes() < before + NUMBERS


def test_fp8_checkpoints_are_near() -> None:
    (loss, gradients), (expected_loss, expected) = (
        trained(SPEC, ALL | {"offload_checkpoints": True, **more}, False) for more in ({"checkpoint_format": "fp8"}, {})
    )
    assert torch.equal(loss, expected_loss)
    for name, gradient in gradients.items():
        error = (gradient.float() - expected[name].float()).norm() / expected[name].float().norm()
        assert error < 0.15, (name, float(error))
