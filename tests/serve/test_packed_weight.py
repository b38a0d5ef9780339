"""Packed weights in the engine: joined they give what the layers give one by one, and nothing is held twice."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from tests.compress.conftest import SPEC, random_model
from tests.serve.test_streams import CONFIG
from tightfit.models.decoder import Decoder
from tightfit.models.quantized.linear import QuantizedLinear, quantize_linear
from tightfit.models.quantized.ranges import fit_grid
from tightfit.models.quantized.scheme import Scheme
from tightfit.serve.engine import Engine
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.weights.joint import can_join

GREEDY = Sampling(max_tokens=12, temperature=0.0)


def coded(linear: nn.Linear, bits: int, symmetric: bool) -> QuantizedLinear:
    return coded_as(linear, Scheme(kind="int", bits=bits, group=32, symmetric=symmetric))


def coded_as(linear: nn.Linear, scheme: Scheme) -> QuantizedLinear:
    return quantize_linear(linear, fit_grid(linear.weight.detach(), scheme).code(linear.weight.detach()))


def quantized(bits_of_down: int = 8, *, alike: bool = True) -> Decoder:
    """Layer 0 plain, the other in 4 bits but for its last projection, and where not `alike` its keys in 8."""
    model = random_model(SPEC)
    layer: Any = model.layers[1]
    attention, mlp = layer.attention, layer.mlp
    for name in ("q", "k", "v", "o"):
        setattr(
            attention, name, coded(getattr(attention, name), 8 if name == "k" and not alike else 4, symmetric=False)
        )
    mlp.gate, mlp.up, mlp.down = coded(mlp.gate, 4, True), coded(mlp.up, 4, True), coded(mlp.down, bits_of_down, True)
    return model


def in_8_bit_floats(*, rounded: bool) -> Decoder:
    """Every projection and the output projection, with a scale a row; inputs are `rounded` too or left as they are."""
    model = random_model(SPEC)
    scheme = Scheme(kind="fp8", bits=8, group=0, activations="fp8" if rounded else None)
    for layer in model.layers:
        for part in (layer.attention, layer.mlp):
            for name, linear in list(part.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(part, name, coded_as(linear, scheme))
    model.head = coded_as(model.head, scheme)  # type: ignore[assignment]
    return model


def answers(model: Decoder) -> list[list[int]]:
    asked = [Request(id=str(i), prompt=[3 + i, 7, 9, 30 - i], sampling=GREEDY) for i in range(3)]
    made = Engine(model, None, CONFIG).generate(asked)
    return [made[each.id][0].tokens for each in asked]


@pytest.mark.parametrize("alike", [True, False])
def test_joined_or_not_the_answers_are_the_layers(alike: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized(alike=alike)
    assert can_join(model) is alike
    joined = answers(deepcopy(model))
    monkeypatch.setattr("tightfit.serve.forward.runner.can_join", lambda model: False)
    assert joined == answers(model)


@pytest.mark.parametrize("rounded", [True, False])
def test_8_bit_floats_answer_as_their_layers_do(rounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = in_8_bit_floats(rounded=rounded)
    assert can_join(model)
    joined = answers(deepcopy(model))
    monkeypatch.setattr("tightfit.serve.forward.runner.can_join", lambda model: False)
    assert joined == answers(model)


@pytest.mark.parametrize("make", [quantized, lambda: in_8_bit_floats(rounded=False)])
def test_nothing_is_held_twice(make: Callable[[], Decoder]) -> None:
    model = make()
    answers(model)
    layer: Any = model.layers[1]
    attention = layer.attention
    starts = [attention.q.packed.untyped_storage().data_ptr(), attention.k.packed.untyped_storage().data_ptr()]
    assert starts[0] == starts[1]
    x = torch.randn(3, SPEC.hidden_size)
    torch.testing.assert_close(attention.k(x), x @ attention.k.dequantize(torch.float32).T)
