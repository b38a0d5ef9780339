"""What the formulas say a layer keeps against what autograd keeps: to the byte, on the operators a GPU runs.

Hooks see every tensor saved for backward; each storage counts once, weights and tokens not at all. Numbers of a few
bytes (divisors, scales) are left out on both sides.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.covering import sampled, thorough
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.levers.checkpointing import checkpoint_layers
from tightfit.memory.formulas.layer import layer_kept
from tightfit.memory.formulas.layer_moments import attention_kind
from tightfit.memory.formulas.local_shape import LocalShape
from tightfit.memory.formulas.rank import RankMemory
from tightfit.memory.simulation import simulated
from tightfit.models.decoder import Decoder, Implementations
from tightfit.models.initialisation import init_weights
from tightfit.models.presets import preset, preset_names
from tightfit.models.spec import ModelSpec

ROWS, LENGTH = 2, 32
SCALAR_BYTES = 8
TINY = [name for name in preset_names() if name.startswith("tiny-")]


class Saved:
    """Bytes of distinct storages that autograd has been given to keep."""

    def __init__(self, model: Decoder, *others: Tensor) -> None:
        """Parameters and `others` do not count; all are held, so that no address is used twice."""
        self.left_out = (*model.parameters(), *others)
        self.known = {x.untyped_storage()._cdata for x in self.left_out}
        self.storages: dict[int, torch.UntypedStorage] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known and storage.nbytes() > SCALAR_BYTES:
            self.storages[storage._cdata] = storage
        return tensor

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())

    @contextmanager
    def watching(self) -> Iterator["Saved"]:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor):
            yield self


def implementations(spec: ModelSpec, loss: str = "triton") -> Implementations:
    """What a GPU takes: torch's attention where causality says it all, else ours."""
    shape = LocalShape(spec, ROWS, LENGTH, 2)
    plain = all(attention_kind(shape, layer) == "fused" for layer in range(spec.layers))
    return Implementations(
        attention="sdpa" if plain else "triton",
        linear_cross_entropy=loss,  # type: ignore[arg-type]
        norm="triton",
        rope="triton",
        glu="triton",
    )


def decoder(spec: ModelSpec, dtype: torch.dtype, loss: str = "triton") -> Decoder:
    """The decoder with the implementations a GPU takes."""
    torch.manual_seed(0)
    model = Decoder(spec, implementations(spec, loss))
    init_weights(model)
    return model.to(dtype)


def saved_bytes(model: Decoder) -> int:
    tokens = torch.randint(0, model.spec.vocab_size, (ROWS, LENGTH))
    with Saved(model, tokens).watching() as saved:
        output = model(tokens, tokens)
    assert output.loss is not None
    return saved.bytes


def rank_of(spec: ModelSpec, precision: str, **levers: object) -> RankMemory:
    workload = Workload(spec=spec, sequence_length=LENGTH, global_batch=ROWS, precision=precision)  # type: ignore[arg-type]
    return RankMemory(workload, Layout(micro_batch=ROWS), Levers.model_validate(levers), 0)


SLOW = ("tiny-mixtral", "tiny-olmoe", "tiny-qwen2-moe")
"""Routed as others are, and slow in Triton's interpreter."""


@sampled(5)
@pytest.mark.parametrize("name", [thorough(name) if name in SLOW else name for name in TINY])
def test_one_layer_keeps_what_autograd_keeps(name: str) -> None:
    """fp16, whose kernels the interpreter runs exactly, so that float32 and 16-bit tensors are told apart."""
    spec = preset(name)
    shape = LocalShape(spec, ROWS, LENGTH, 2)
    model = decoder(spec, torch.float16)
    x = torch.randn(ROWS, LENGTH, spec.hidden_size, dtype=torch.float16, requires_grad=True)
    ctx = model.forward_context(x, torch.arange(LENGTH)[None], None, None)
    tables = [table for pair in ctx.rope_tables.values() for table in pair]
    for index in {0, spec.layers - 1}:
        saved = Saved(model, *tables)
        with saved.watching():
            made, _ = model.layers[index](x * 1.0, ctx)
        assert made.shape == x.shape
        assert saved.bytes == sum(kept.bytes for kept in layer_kept(shape, index))


KEPT: list[dict[str, Any]] = [
    {},
    {"checkpoint_every": 1},
    {"checkpoint_every": 2},
    {"num_checkpoints": 1},
    {"checkpoint_every": 1, "checkpoint_keep": "attention"},
    {"checkpoint_every": 1, "checkpoint_keep": "matmuls"},
    {"checkpoint_every": 1, "offload_checkpoints": True},
    {"checkpoint_every": 1, "offload_checkpoints": True, "checkpoint_host_bytes": 0},
]


@sampled(3)
@pytest.mark.parametrize("levers", KEPT, ids=lambda levers: "-".join(f"{value}" for value in levers.values()) or "none")
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma3", "tiny-gpt2", "tiny-mixtral", "tiny-qwen3"])
def test_a_model_keeps_what_is_alive_after_forward(name: str, levers: dict[str, Any]) -> None:
    """Whoever holds it: autograd, a checkpoint, or a checkpoint's kept results. On fake tensors, which are quick."""
    spec = preset(name)
    gpu, host = alive_bytes(spec, Levers.model_validate(levers))
    rank = rank_of(spec, "fp16", **levers)
    assert gpu == sum(rank.stage.saved) + rank.stage.outside_bytes + rank.loss.kept
    assert host == rank.host.checkpoints


def alive_bytes(spec: ModelSpec, levers: Levers) -> tuple[int, int]:
    """On the GPU and on the host, of tensors that were made in a forward pass and are there when it has ended."""
    torch.set_default_dtype(torch.float16)
    try:
        with simulated() as tracer:
            model = Decoder(spec, implementations(spec))
            checkpoint_layers(model, levers)
            tokens = torch.zeros(ROWS, LENGTH, dtype=torch.long)
            tracer.begin("forward")
            output = model(tokens, tokens)
            freed = {~event for event in tracer.trace.events if event < 0}
    finally:
        torch.set_default_dtype(torch.float32)
    assert output.loss is not None
    alive = [made for number, made in enumerate(tracer.trace.allocations) if number not in freed]
    alive = [made for made in alive if made.component != "weights" and made.bytes > SCALAR_BYTES]
    alive = [made for made in alive if made.operation != "aten.where.self"]  # labels as the loss reads them
    sums = [sum(made.bytes for made in alive if made.place == place) for place in ("gpu", "host")]
    return sums[0], sums[1]


@sampled(2)
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma2"])
@pytest.mark.parametrize("loss", ["fused", "plain"])
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("fp16", torch.float16)])
def test_the_loss_keeps_what_autograd_keeps(name: str, loss: str, precision: str, dtype: torch.dtype) -> None:
    spec = replace(preset(name), layers=1, window_layers=())  # layers are compared one by one above
    model = decoder(spec, dtype, "triton" if loss == "fused" else "eager")
    rank = rank_of(spec, precision, loss=loss)
    assert saved_bytes(model) == sum(rank.stage.saved) + rank.stage.outside_bytes + rank.loss.kept
