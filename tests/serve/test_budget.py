"""What an engine predicted that it would hold, beside the tensors that are there."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.covering import sampled
from tests.serve.conftest import SHAPE
from tightfit.memory.formulas.serving import cache_bytes_per_token, serving_ledger
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.serve import budget
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.held_bytes import held_bytes
from tightfit.serve.weights.half import cpu_has_products

CONFIG = EngineConfig(max_sequences=4, step_tokens=64, max_length=64, cache_bytes=2**24)
ALLOWED = 0.02
"""What buffers (tables of angles, counters) may take beside weights and cache."""


def test_every_storage_counts_once() -> None:
    base = torch.zeros(100)
    module = nn.Linear(3, 5, bias=False)
    module.register_buffer("codes", torch.zeros(7, dtype=torch.uint8))
    parts: Any = {"a": [base, base[10:20], base.view(10, 10)], "b": (module, module), "c": "text"}
    parts["itself"] = parts
    assert held_bytes(parts) == 400 + 60 + 7
    assert held_bytes(base[:1]) == 400
    assert held_bytes(None, 3, "x") == 0


@pytest.mark.parametrize(("free", "wanted"), [(3 * 2**20, 3 * 2**20), (None, budget.UNKNOWN_FREE_BYTES)])
def test_a_container_has_what_is_left_of_its_limit(
    free: int | None, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what is free of the machine; and a system without /proc is no error."""
    monkeypatch.setattr(budget, "free_host_bytes", lambda: free)
    assert budget.free_bytes(torch.device("cpu")) == wanted


@pytest.fixture(scope="module")
def wide() -> Decoder:
    """Wide enough that what is predicted outweighs small tables."""
    torch.manual_seed(0)
    made = Decoder(replace(SHAPE, hidden_size=256, heads=8, head_dim=32, mlp_size=640, layers=4, vocab_size=2000))
    init_weights(made)
    return made.eval()


@sampled(3)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"half_weights": False},
        {"cache_format": "int8"},
        {"speculation": "draft"},
        {"speculation": "skip", "skipped_layers": 2},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_cache_take_what_was_predicted(wide: Decoder, changes: dict[str, Any], dtype: torch.dtype) -> None:
    model = Decoder(wide.spec).to(dtype).eval()
    model.load_state_dict(wide.state_dict())
    draft = wide if changes.get("speculation") == "draft" else None
    engine = Engine(model, None, replace(CONFIG, **changes), draft=draft)
    predicted = engine.budget.standing_bytes
    assert abs(engine.allocated_bytes / predicted - 1) <= ALLOWED, (engine.allocated_bytes, predicted)
    assert f"allocated {engine.allocated_bytes / 2**20:,.0f} MiB" in engine.describe()


def test_the_planned_cache_holds_as_many_requests_as_the_engines(wide: Decoder) -> None:
    """Also where layers have a window, whose pages are fewer than others' blocks."""
    spec = replace(wide.spec, window=16, window_layers=(0, 2), max_positions=4096)
    config = EngineConfig(max_sequences=4, max_length=2048, cache_bytes=2**30)
    engine = Engine(Decoder(spec).eval(), None, config)
    assert engine.pool.size * config.block_size == 4 * 2048
    assert 0 < engine.budget.pages < engine.pool.size / 3
    ledger = serving_ledger(spec, form="fp32", requests=4, length=2048, element_bytes=4)
    planned = [line.bytes for line in ledger.lines if line.detail == "keys and values"]
    assert planned == [engine.budget.cache_bytes]
    assert abs(engine.allocated_bytes / engine.budget.standing_bytes - 1) <= ALLOWED
    stages = [replace(spec, layers=1, window_layers=own) for own in ((0,), (), (0,))]
    shared = [budget.decide_budget(engine.model, config, spec=stage, agree=lambda *own: (512, 70)) for stage in stages]
    assert [(each.blocks, each.pages) for each in shared] == [(512, 70)] * 3
    layer_bytes = config.block_size * cache_bytes_per_token(stages[0], 4)
    assert [each.cache_bytes for each in shared] == [70 * layer_bytes, 512 * layer_bytes, 70 * layer_bytes]


@pytest.mark.skipif(not cpu_has_products(), reason="this CPU's torch has no products with 16-bit weights")
def test_a_16_bit_copy_is_found_beside_its_original(wide: Decoder) -> None:
    published = Decoder(wide.spec).eval()
    published.load_state_dict({name: tensor.bfloat16() for name, tensor in wide.state_dict().items()})
    engine = Engine(published, None, CONFIG)
    assert engine.budget.half_bytes > 0.05 * engine.budget.standing_bytes
    assert abs(engine.allocated_bytes / engine.budget.standing_bytes - 1) <= ALLOWED
