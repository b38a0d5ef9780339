"""The ledger of compressing against the tensors that were alive, phase by phase as each one is made the largest."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.compress.conftest import SPEC, random_model
from tightfit.compress.layer_compression import compress_layer
from tightfit.compress.memory import compression_ledger
from tightfit.compress.recipe import recipe_of
from tightfit.memory.ledger import Phase
from tightfit.memory.tracing import Tracer
from tightfit.models.spec import ModelSpec

WIDE = replace(SPEC, layers=1, vocab_size=32, hidden_size=64, mlp_size=384, max_positions=512)
SQUARE = replace(SPEC, layers=1, vocab_size=32, hidden_size=192, heads=3, kv_heads=3, head_dim=64, mlp_size=192)


@pytest.mark.parametrize(
    ("spec", "method", "rows", "length", "phase"),
    [
        (WIDE, "gptq", 1, 64, "coding"),
        (WIDE, "spqr", 1, 64, "coding"),
        (WIDE, "awq", 4, 512, "forward"),
        (replace(SPEC, layers=1, mlp_size=64), "gptq", 64, 128, "forward"),
        (SQUARE, "gptq", 1, 64, "coding"),
    ],
)
def test_predicted_against_alive(spec: ModelSpec, method: str, rows: int, length: int, phase: Phase) -> None:
    model = random_model(spec)
    options: dict[str, Any] = {} if method == "spqr" else {"bits": 4, "group": 64}
    recipe = recipe_of(method, **options)
    layer_bytes = sum(p.nbytes for p in model.layers.parameters())
    batch = max(8192 // length, 1)
    with Tracer() as tracer:
        inputs = list(torch.randn(rows, length, spec.hidden_size).split(batch))
        compress_layer(model, 0, recipe, inputs)
    ledger = compression_ledger(spec, recipe, rows, length)
    alive_bytes = tracer.trace.replay().peak_allocated_bytes + layer_bytes  # the layer was there before
    assert ledger.fullest() == (phase, 0)
    assert alive_bytes == pytest.approx(ledger.allocated_bytes(phase), rel=0.15)
