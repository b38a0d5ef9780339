"""4-bit codes multiplied as they are packed, on a CPU: joined they give what the layers give, nothing is held twice."""

from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.compress.conftest import SPEC, random_model
from tests.serve.test_packed_weight import coded_as
from tests.serve.test_streams import CONFIG
from tightfit.kernels.quantized.int4_linear import MOST_ROWS, code_order
from tightfit.models.decoder import Decoder
from tightfit.models.huggingface.adapter import LowRank
from tightfit.models.layers.linear_plus_adapter import LinearPlusAdapter
from tightfit.models.quantized.directory import replace_module
from tightfit.models.quantized.experts import QuantizedStack
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.quantized.ranges import fit_grid
from tightfit.models.quantized.scheme import Scheme
from tightfit.models.spec import Experts
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.weights.adapted import AdaptedWeight
from tightfit.serve.weights.cpu_codes import expand_for_cpu, pack_for_cpu
from tightfit.serve.weights.int4 import Int4Weight
from tightfit.serve.weights.joint import can_join
from tightfit.serve.weights.packed import PackedWeight

pytestmark = pytest.mark.skipif(code_order() is None, reason="this CPU's torch has no fast product with 4-bit codes")
WIDE = replace(SPEC, hidden_size=128, heads=2, kv_heads=1, head_dim=64, tied=False)
"""Whose every projection has whole strips of rows, and which does not say again what it was told."""


def coded_model(*, symmetric: bool = False, group: int = 32, bits: int = 4) -> Decoder:
    """All layers in codes."""
    model = random_model(WIDE)
    scheme = Scheme(kind="int", bits=bits, group=group, symmetric=symmetric)
    for layer in model.layers:
        for part in (layer.attention, layer.mlp):
            for name, linear in list(part.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(part, name, coded_as(linear, scheme))
    return model


def answers(model: Decoder, config: EngineConfig = CONFIG) -> list[list[int]]:
    greedy = Sampling(max_tokens=4, temperature=0.0)
    asked = [Request(id=str(i), prompt=[3 + i, 7, 9, 30 - i], sampling=greedy) for i in range(3)]
    made = Engine(model, None, config).generate(asked)
    said = [made[each.id][0].tokens for each in asked]
    assert len({token for tokens in said for token in tokens}) > 6
    return said


def layers_of(model: Decoder) -> list[QuantizedLinear]:
    return [layer for layer in model.modules() if isinstance(layer, QuantizedLinear)]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64])
def test_joined_or_not_the_answers_are_the_layers(symmetric: bool, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = coded_model(symmetric=symmetric, group=group)
    engine = Engine(deepcopy(model), None, CONFIG)
    assert engine.runner.program is not None
    assert isinstance(engine.runner.program.layers[0].qkv, Int4Weight)
    joined = answers(deepcopy(model))
    monkeypatch.setattr("tightfit.serve.forward.runner.can_join", lambda model: False)
    assert joined == answers(model)
    assert all(layer.cpu_scales is not None for layer in layers_of(model))


def test_adapters_are_added_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = coded_model()
    for layer in cast(Any, model.layers):
        base = layer.attention.q
        down, up = torch.randn(4, base.in_features) * 0.1, torch.randn(base.out_features, 4)
        layer.attention.q = LinearPlusAdapter(base, LowRank(down=down, up=up))
    engine = Engine(deepcopy(model), None, CONFIG)
    assert engine.runner.program is not None
    qkv = engine.runner.program.layers[0].qkv
    assert isinstance(qkv, AdaptedWeight)
    assert isinstance(qkv.base, Int4Weight)
    joined = answers(deepcopy(model))
    assert joined != answers(coded_model())
    monkeypatch.setattr("tightfit.serve.forward.runner.can_join", lambda model: False)
    assert joined == answers(model)


def test_few_rows_are_rounded_to_bfloat16_and_many_not_at_all() -> None:
    model = coded_model()
    layer: Any = model.layers[0]
    exact = {name: part.dequantize(torch.float32) for name, part in layer.mlp.named_children()}
    program: Any = Engine(model, None, CONFIG).runner.program
    weight = program.layers[0].down
    for rows in (1, MOST_ROWS, MOST_ROWS + 1):
        x = torch.randn(rows, WIDE.mlp_size)
        true = x.double() @ exact["down"].double().T
        off = torch.linalg.vector_norm(weight.product(x) - true) / torch.linalg.vector_norm(true)
        assert off < (2.0**-7 if rows <= MOST_ROWS else 1e-6)  # of inputs, scales and results half a spacing each
        assert torch.equal(weight.product(x), layer.mlp.down(x))
    assert torch.equal(layer.mlp.down.dequantize(torch.float32), exact["down"])


def test_nothing_is_held_twice_and_the_budget_counts_all() -> None:
    model = coded_model()
    before = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    engine = Engine(model, None, CONFIG)
    attention: Any = model.layers[1].attention
    starts = {part.packed.untyped_storage().data_ptr() for part in (attention.q, attention.k, attention.v)}
    assert len(starts) == 1
    rounded_scales = sum(4 * layer.in_features // 32 * layer.out_features for layer in layers_of(model))
    assert engine.budget.weight_bytes == before + rounded_scales


def test_a_second_engine_on_the_same_model_answers_the_same() -> None:
    model = coded_model()
    assert answers(model) == answers(model)


def test_they_stay_exact_where_asked() -> None:
    for config in (replace(CONFIG, packed_products=False), replace(CONFIG, batch_invariant=True)):
        model = coded_model()
        program: Any = Engine(model, None, config).runner.program
        assert isinstance(program.layers[0].qkv, PackedWeight)
        assert all(layer.cpu_scales is None for layer in layers_of(model))


def test_what_the_product_does_not_take_stays_as_it_is() -> None:
    for model in (coded_model(bits=8), coded_model(group=0)):
        pack_for_cpu(model)
        assert all(layer.cpu_scales is None for layer in layers_of(model))


def test_projections_of_one_input_are_all_held_or_none() -> None:
    """Keys in other codes than queries: held apart they could not be joined with what is not."""
    model = coded_model()
    layer, plain = cast(Any, model.layers[0]), cast(Any, random_model(WIDE).layers[0])
    layer.attention.k = coded_as(plain.attention.k, Scheme(kind="int", bits=8, group=32))
    pack_for_cpu(model)
    assert layer.attention.q.cpu_scales is None
    assert layer.mlp.up.cpu_scales is not None
    assert not can_join(model)


def test_other_codes_are_expanded_once_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers, and therefore the same answers."""
    model = coded_model(bits=8)
    wanted = answers(deepcopy(model))
    coded = {name: part for name, part in model.named_modules() if isinstance(part, QuantizedLinear)}
    exact = {name: part.dequantize(torch.float32) for name, part in coded.items()}
    monkeypatch.setattr("tightfit.serve.weights.cpu_codes.FEWEST_EXPANDED", 1)
    bytes_needed = 4 * sum(weight.numel() for weight in exact.values())
    assert not expand_for_cpu(model, bytes_needed - 1)
    assert len(layers_of(model)) == len(exact)
    assert answers(model, replace(CONFIG, half_weights=False)) == wanted
    assert not layers_of(model)
    assert all(torch.equal(model.get_parameter(f"{name}.weight"), weight) for name, weight in exact.items())


@pytest.mark.parametrize("bits", [4, 8])
def test_experts_are_expanded_as_a_stack(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no layers of their own; no product reads their codes, 4-bit ones neither."""
    spec = replace(WIDE, family="mixtral", experts=Experts(count=4, per_token=2, mlp_size=128))
    model = random_model(spec)
    scheme = Scheme(kind="int", bits=bits, group=32)
    experts = [layer.mlp.experts for layer in cast(Any, model.layers)]
    for layer, name in product(range(spec.layers), ("gate", "up", "down")):
        coded = [fit_grid(weight, scheme).code(weight) for weight in getattr(experts[layer], name).detach()]
        replace_module(model, f"layers.{layer}.mlp.experts.{name}", QuantizedStack(coded, torch.float32))
    exact = [stacks.down.dequantize(torch.float32) for stacks in experts]
    held = replace(CONFIG, packed_products=False)
    wanted = answers(deepcopy(model), held)
    assert answers(deepcopy(model)) == wanted
    monkeypatch.setattr("tightfit.serve.weights.cpu_codes.FEWEST_EXPANDED", 1)
    assert answers(model) == wanted
    assert not layers_of(model)
    assert all(torch.equal(stacks.down, weight) for stacks, weight in zip(experts, exact, strict=True))
