"""Formulas of tensor ranks and hybrid shards against the real step on fake ranks: peak and phases."""

from dataclasses import replace
from typing import Any

import pytest

from tests.covering import covering, sampled
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.fsdp2 import installed
from tightfit.memory.formulas.overheads import Overheads
from tightfit.memory.formulas.training import training_ledger
from tightfit.memory.ledger import Phase
from tightfit.models.presets import preset
from tightfit.prove.rehearsal import rehearse

PHASES: tuple[Phase, ...] = ("forward", "loss", "backward", "optimizer")
WHOLE = {"sequence_parallel": False}
CASES: list[tuple[str, dict[str, Any], dict[str, Any], str, int, int]] = [
    ("llama-3.1-8b", {"tensor": 2}, {}, "bf16", 1, 2048),
    ("llama-3.1-8b", {"tensor": 2, **WHOLE}, {}, "bf16", 1, 2048),
    ("llama-3.1-8b", {"tensor": 4}, {"checkpoint_every": 2}, "bf16", 2, 8192),
    ("llama-3.1-8b", {"tensor": 4, **WHOLE}, {}, "pure-bf16", 1, 8192),
    ("llama-3.1-8b", {"tensor": 8}, {"checkpoint_every": 1}, "pure-bf16", 1, 65536),
    ("llama-3.1-8b", {"tensor": 8, **WHOLE}, {"checkpoint_every": 1}, "pure-bf16", 2, 16384),
    ("llama-3.1-8b", {"tensor": 8}, {}, "pure-bf16", 1, 32768),
    ("mixtral-8x7b", {"tensor": 8}, {}, "pure-bf16", 1, 16384),
    ("gemma-2-9b", {"tensor": 4}, {}, "bf16", 1, 4096),
    ("llama-3.1-8b", {"tensor": 2, "data": 4}, {}, "bf16", 1, 2048),
    ("llama-3.1-8b", {"tensor": 2, "data": 4, "zero": 1}, {"checkpoint_every": 1}, "bf16", 2, 2048),
    ("llama-3.1-8b", {"tensor": 4, "data": 2, "zero": 3}, {"checkpoint_every": 1}, "bf16", 1, 32768),
    ("llama-3.1-8b", {"tensor": 4}, {"tiles": 4, "checkpoint_every": 1}, "bf16", 1, 32768),
    ("llama-3.1-8b", {"data": 4, "zero": 3}, {"tiles": 4, "checkpoint_every": 1}, "pure-bf16", 1, 16384),
    ("llama-3.1-8b", {"tensor": 4}, {"update_in_backward": True, "checkpoint_every": 1}, "bf16", 1, 8192),
    ("llama-3.1-8b", {"tensor": 2, "data": 4, "zero": 3}, {"update_in_backward": True}, "pure-bf16", 1, 2048),
    ("llama-3.1-8b", {"data": 4, "zero": 3}, {"offload": "weights", "checkpoint_every": 1}, "bf16", 1, 4096),
    ("llama-3.1-8b", {"data": 4, "zero": 1}, {"offload": "weights"}, "bf16", 2, 2048),
    ("llama-3.1-8b", {"data": 8, "zero": 3, "shard_inside": 4}, {"checkpoint_every": 1}, "bf16", 1, 2048),
    ("llama-3.1-8b", {"data": 8, "zero": 1, "shard_inside": 4}, {"checkpoint_every": 1}, "bf16", 3, 2048),
    ("llama-3.1-8b", {"data": 8, "zero": 2, "shard_inside": 4, "tensor": 2}, {}, "bf16", 2, 2048),
    ("llama-3.1-8b", {"tensor": 4, "tensor_mesh": "2d", "micro_batch": 4}, {"checkpoint_every": 1}, "bf16", 1, 4096),
    ("llama-3.1-8b", {"tensor": 8, "tensor_mesh": "2.5d", "tensor_depth": 2, "micro_batch": 4}, {}, "bf16", 1, 4096),
    ("gemma-2-9b", {"tensor": 8, "tensor_mesh": "3d", "micro_batch": 4}, {}, "bf16", 1, 4096),
    ("llama-3.1-8b", {"tensor": 8, "tensor_mesh": "3d", "micro_batch": 4}, {"checkpoint_every": 1}, "bf16", 1, 32768),
]


@sampled(5)
@pytest.mark.parametrize(("model", "layout", "levers", "precision", "accumulation", "length"), covering(CASES))
def test_the_peak_is_the_simulations(
    model: str, layout: dict[str, Any], levers: dict[str, Any], precision: Any, accumulation: int, length: int
) -> None:
    layers = 4 if length < 65536 else 10  # enough that forward is not fullest beside the embeddings of all tokens
    spec = replace(preset(model), layers=layers)
    spec = replace(spec, window_layers=tuple(layer for layer in spec.window_layers if layer < layers))
    given, levers_given = Layout.model_validate({"micro_batch": 1, **layout}), Levers.model_validate(levers)
    batch = given.micro_batch * given.data * accumulation
    workload = Workload(spec=spec, sequence_length=length, global_batch=batch, precision=precision)
    found = training_ledger(workload, given, levers_given, Overheads(context_bytes=0, slack_share=0, fsdp2=installed()))
    truth = rehearse(workload, given, levers_given)
    close = 0.01 if set(levers) & {"offload", "update_in_backward", "tiles"} else 0.05
    assert found.peak_allocated_bytes() == pytest.approx(truth.peak_allocated_bytes(), rel=close)
    for phase in PHASES:
        assert found.allocated_bytes(phase) == pytest.approx(truth.allocated_bytes(phase), rel=0.06), phase
