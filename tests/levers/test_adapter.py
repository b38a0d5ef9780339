"""Adapters on frozen layers: loss and gradients as PEFT has them, on plain and on packed weights, under levers."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from tests.covering import sampled
from tests.models.huggingface.reference import distance, pair
from tightfit.jobs.adapter import AdapterTraining
from tightfit.jobs.job import Optimizer
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.levers.adapter import adapters, attach, frozen_linears, initialise, restore
from tightfit.models.adapted import read_matrices, write_adapter
from tightfit.models.base_model import BaseModel
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.presets import preset
from tightfit.models.quantized.holding import hold_in_codes
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.quantized.scheme import Scheme
from tightfit.train.assembly import assemble

RANK, ALPHA = 4, 6.0
BASE = BaseModel(source="somewhere", digest="")
CPU = torch.device("cpu")


def adapted(model: Decoder, **fields: Any) -> Decoder:
    """`model` with adapters of random matrices."""
    made = deepcopy(model)
    attach(made, AdapterTraining(rank=RANK, alpha=ALPHA, **fields), torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for matrix in (matrix for both in adapters(made).values() for matrix in both):
            matrix.copy_(torch.randn(matrix.shape, generator=generator) * 0.1)
    return made


def gradients(model: Decoder, tokens: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    loss = model(tokens, labels=labels, divisor=float((labels != -100).sum())).loss
    assert loss is not None
    loss.backward()
    found = {name: tuple(matrix.grad for matrix in both) for name, both in adapters(model).items()}
    assert all(gradient is not None for both in found.values() for gradient in both)
    return loss.detach(), found  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("family", "targets"), [("llama", "all-linear"), ("qwen3", ["q_proj", "v_proj"]), ("gemma2", ["o", "gate", "down"])]
)
def test_loss_and_gradients_are_pefts(family: str, targets: Any, tmp_path: Path) -> None:
    both = pair(family)
    ours = adapted(both.ours, targets=targets)
    write_adapter(tmp_path, ours.spec, adapters(ours), BASE, rank=RANK, alpha=ALPHA, dropout=0.0)
    theirs: Any = peft.PeftModel.from_pretrained(deepcopy(both.theirs), str(tmp_path), is_trainable=True)
    wanted = theirs(input_ids=both.tokens, labels=both.labels, shift_labels=both.labels).loss
    wanted.backward()
    found, own = gradients(ours, both.tokens, both.labels)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
    graded = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    assert len(graded) == 2 * len(own)
    names = {matrix: name for name, matrix in _their_names(ours, own).items()}
    for name, gradient in graded.items():
        assert distance(gradient, names_to(own, names, name)) < 1e-4, name


def _their_names(model: Decoder, own: dict[str, Any]) -> dict[tuple[str, int], str]:
    """PEFT's parameter of each of our matrices."""
    their = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"}
    their |= {part: f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    found = {}
    for name in own:
        _, layer, _, part = name.split(".")
        for index, matrix in enumerate("AB"):
            module = f"base_model.model.model.layers.{layer}.{their[part]}"
            found[name, index] = f"{module}.lora_{matrix}.default.weight"
    return found


def names_to(own: dict[str, Any], names: dict[str, tuple[str, int]], theirs: str) -> Tensor:
    name, index = names[theirs]
    gradient: Tensor = own[name][index]
    return gradient


@pytest.mark.parametrize("family", ["phi3", "gpt2"])
@pytest.mark.parametrize("targets", ["all-linear", ["q", "v", "up"]])
def test_joint_modules_are_written_as_blocks_and_read_back(family: str, targets: Any, tmp_path: Path) -> None:
    """Phi-3 and GPT-2 keep q, k and v in one module, of which PEFT has one adapter."""
    both = pair(family)
    ours = adapted(both.ours, targets=targets)
    write_adapter(tmp_path, ours.spec, adapters(ours), BASE, rank=RANK, alpha=ALPHA, dropout=0.0)
    theirs: Any = peft.PeftModel.from_pretrained(deepcopy(both.theirs), str(tmp_path))
    with torch.no_grad():
        torch.testing.assert_close(ours(both.tokens).logits, theirs(both.tokens).logits, rtol=1e-4, atol=1e-4)
        assert distance(ours(both.tokens).logits, both.ours(both.tokens).logits) > 1e-2
    again = adapted(both.ours, targets=targets)
    initialise(again, 0)
    restore(again, read_matrices(tmp_path, ours.spec, adapters(again)), "there")
    for one, other in zip(adapters(again).values(), adapters(ours).values(), strict=True):
        assert all(map(torch.equal, one, other))


@pytest.fixture(scope="module")
def small() -> Decoder:
    torch.manual_seed(0)
    model = Decoder(replace(preset("tiny-llama"), layers=2, vocab_size=96, hidden_size=64, mlp_size=128))
    init_weights(model)
    return model


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(3))
    return tokens, tokens.roll(-1, 1)


def test_new_adapters_change_nothing_and_begin_as_pefts(small: Decoder) -> None:
    model, (tokens, _) = deepcopy(small), batch()
    attach(model, AdapterTraining(rank=RANK), torch.float32)
    initialise(model, seed=5)
    assert torch.equal(model(tokens).logits, small(tokens).logits)
    for a, b in adapters(model).values():
        bound = a.shape[1] ** -0.5
        assert not b.any()
        assert bound * 0.9 < a.abs().max() <= bound
        assert abs(float(a.detach().var()) - bound**2 / 3) < 0.15 * bound**2
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        f"{name}.lora_{matrix}" for name in adapters(model) for matrix in "ab"
    }


@pytest.mark.parametrize("scheme", [Scheme(bits=4, group=32, symmetric=False), Scheme(kind="nf4", bits=4, group=64)])
def test_packed_weights_have_the_gradients_of_expanded_ones(scheme: Scheme, small: Decoder) -> None:
    packed = deepcopy(small)
    hold_in_codes(packed, scheme, CPU)
    plain = deepcopy(small)
    for name, layer in frozen_linears(packed):
        assert isinstance(layer, QuantizedLinear)
        weight = plain.get_parameter(f"{name}.weight")
        weight.data.copy_(layer.dequantize(torch.float32))
        assert not torch.equal(weight, small.get_parameter(f"{name}.weight"))
    before = {name: buffer.clone() for name, buffer in packed.named_buffers()}
    (loss, found), (wanted_loss, wanted) = (gradients(adapted(each), *batch()) for each in (packed, plain))
    assert loss.item() == pytest.approx(wanted_loss.item(), rel=1e-6)
    for name, both in found.items():
        for one, other in zip(both, wanted[name], strict=True):
            assert distance(one, other) < 1e-5, name
    assert all(torch.equal(buffer, before[name]) for name, buffer in packed.named_buffers())


@sampled(3)
@pytest.mark.parametrize(
    "levers",
    [
        {"checkpoint_every": 1},
        {"checkpoint_every": 2, "checkpoint_keep": "attention"},
        {"tiles": 3},
        {"tiles": 2, "checkpoint_every": 1, "offload_checkpoints": True},
        {"loss": "plain"},
        {"loss_chunk_bytes": 0},
    ],
)
@pytest.mark.parametrize("bits", [None, 4])
def test_levers_leave_gradients_alone(levers: dict[str, Any], bits: Any, small: Decoder) -> None:
    model = deepcopy(small)
    if bits:
        hold_in_codes(model, Scheme(bits=bits, group=32, symmetric=False), CPU)
    wanted_loss, wanted = gradients(adapted(model), *batch())
    given = adapted(model)
    module, _ = assemble(
        given, None, Layout(micro_batch=2), Levers(**levers), "fp32", Optimizer(), CPU, fill=lambda _: None
    )
    assert isinstance(module, Decoder)
    loss, found = gradients(module, *batch())
    assert loss.item() == pytest.approx(wanted_loss.item(), rel=1e-6)
    for name, both in found.items():
        for one, other in zip(both, wanted[name], strict=True):
            assert distance(one, other) < 1e-5, name


def test_dropped_inputs_are_computed_again_alike(small: Decoder) -> None:
    def found(levers: Levers) -> dict[str, tuple[Tensor, Tensor]]:
        model = adapted(small, dropout=0.5)
        module, _ = assemble(model, None, Layout(micro_batch=2), levers, "fp32", Optimizer(), CPU, fill=lambda _: None)
        torch.manual_seed(9)
        return gradients(module, *batch())[1]  # type: ignore[arg-type]

    kept, again = found(Levers()), found(Levers(checkpoint_every=1))
    whole = gradients(adapted(small), *batch())[1]
    for name, both in kept.items():
        for one, other, undropped in zip(both, again[name], whole[name], strict=True):
            assert torch.equal(one, other)
            assert distance(one, undropped) > 1e-2


def test_a_dropping_layer_is_the_formula() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(16, 8)
    holder: Any = Decoder(replace(preset("tiny-llama"), layers=1, hidden_size=16))
    holder.layers[0].attention.o = linear
    attach(holder, AdapterTraining(rank=2, alpha=3.0, dropout=0.25), torch.float32)
    initialise(holder, 0)
    a, b = (nn.init.normal_(linear.get_parameter(name)) for name in ("lora_a", "lora_b"))
    x = torch.randn(5, 16, requires_grad=True)
    torch.manual_seed(4)
    kept = torch.empty(5, 16, dtype=torch.bool).bernoulli_(0.75)
    wanted = nn.functional.linear(x, linear.weight, linear.bias) + 1.5 * ((x * kept / 0.75) @ a.T @ b.T)
    of_wanted = torch.autograd.grad(wanted.square().sum(), (x, a, b))
    torch.manual_seed(4)
    found = linear(x)
    torch.testing.assert_close(found, wanted)
    for one, other in zip(torch.autograd.grad(found.square().sum(), (x, a, b)), of_wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(
            linear(x), nn.functional.linear(x, linear.weight, linear.bias) + 1.5 * (x @ a.T @ b.T)
        )
