"""Formulas of checkpointing against the real step on fake tensors, on models that are nearly all activations."""

from dataclasses import replace
from typing import Any

import pytest

from tests.covering import sampled
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.overheads import Overheads
from tightfit.memory.formulas.training import training_ledger
from tightfit.memory.ledger import Ledger, Phase
from tightfit.models.presets import preset
from tightfit.prove.rehearsal import rehearse

BARE = Overheads(context_bytes=0, workspace_bytes=0, slack_share=0)
PHASES: tuple[Phase, ...] = ("forward", "loss", "backward")
LENGTH, ROWS, LAYERS = 1024, 16, 5
ALL: dict[str, Any] = {"checkpoint_every": 1}
CASES: list[tuple[str, dict[str, Any], dict[str, Any], str, int]] = [
    ("smollm2-135m", {}, ALL | {"checkpoint_keep": "attention"}, "bf16", 1),
    ("smollm2-135m", {}, ALL | {"checkpoint_keep": "matmuls"}, "pure-bf16", 2),
    ("smollm2-135m", {}, {"checkpoint_every": 2, "checkpoint_keep": "matmuls"}, "fp32", 1),
    ("smollm2-135m", {}, {"num_checkpoints": 3}, "bf16", 1),
    ("smollm2-135m", {}, {"checkpoint_budget_bytes": 600 * 2**20}, "pure-bf16", 1),
    ("smollm2-135m", {}, {"checkpoint_budget_bytes": 600 * 2**20, "offload_checkpoints": True}, "pure-bf16", 1),
    ("smollm2-135m", {}, ALL | {"offload_checkpoints": True}, "bf16", 2),
    ("smollm2-135m", {}, ALL | {"offload_checkpoints": True, "checkpoint_host_bytes": 2 * 18 * 2**20}, "pure-bf16", 1),
    ("smollm2-135m", {}, ALL | {"offload_checkpoints": True, "checkpoint_format": "fp8"}, "pure-bf16", 1),
    (
        "smollm2-135m",
        {"data": 4, "zero": 3},
        ALL | {"offload_checkpoints": True, "checkpoint_keep": "attention"},
        "bf16",
        1,
    ),
    ("gemma-2-9b", {}, ALL | {"checkpoint_keep": "matmuls"}, "bf16", 1),
    ("gpt2-xl", {}, ALL | {"checkpoint_keep": "matmuls", "update_in_backward": True}, "bf16", 1),
    ("qwen3-8b", {}, ALL | {"checkpoint_keep": "attention", "offload_checkpoints": True}, "bf16", 1),
    ("mixtral-8x7b", {}, ALL | {"checkpoint_keep": "matmuls"}, "pure-bf16", 1),
]


def ledgers(
    model: str, layout: dict[str, Any], levers: dict[str, Any], precision: Any, accumulation: int
) -> tuple[Ledger, Ledger]:
    """The formulas' and the simulation's."""
    spec = replace(preset(model), layers=LAYERS, vocab_size=256)
    if spec.hidden_size > 1024:
        experts = None if spec.experts is None else replace(spec.experts, mlp_size=1024)
        spec = replace(
            spec,
            hidden_size=512,
            heads=8,
            kv_heads=8 if model == "gpt2-xl" else 2,
            head_dim=64,
            mlp_size=1536,
            experts=experts,
        )
    spec = replace(spec, window_layers=tuple(layer for layer in spec.window_layers if layer < LAYERS))
    given = Layout.model_validate({"micro_batch": ROWS, **layout})
    batch = ROWS * given.data * accumulation
    workload = Workload(spec=spec, sequence_length=LENGTH, global_batch=batch, precision=precision)
    chosen = Levers.model_validate(levers)
    return training_ledger(workload, given, chosen, BARE), rehearse(workload, given, chosen, BARE)


@sampled(5)
@pytest.mark.parametrize(("model", "layout", "levers", "precision", "accumulation"), CASES)
def test_the_peak_is_the_simulations(
    model: str, layout: dict[str, Any], levers: dict[str, Any], precision: Any, accumulation: int
) -> None:
    found, truth = ledgers(model, layout, levers, precision, accumulation)
    assert found.peak_allocated_bytes() == pytest.approx(truth.peak_allocated_bytes(), rel=0.03)
    for phase in PHASES:
        assert found.allocated_bytes(phase) == pytest.approx(truth.allocated_bytes(phase), rel=0.06), phase
    held = truth.allocated_bytes("backward", place="host")
    assert found.allocated_bytes("backward", place="host") == pytest.approx(held, rel=0.001)
    assert (held > 0) == bool(levers.get("offload_checkpoints"))
    kept = truth.by_component("loss")["activations"] / truth.allocated_bytes("loss")
    assert kept > 0.1, "activations count"
