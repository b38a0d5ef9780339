"""Formulas against the real step on fake tensors, which knows nothing of them: peak and phases of what is allocated."""

from dataclasses import replace
from typing import Any

import pytest

from tests.covering import covering, sampled, thorough
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
CASES: list[tuple[str, dict[str, Any], dict[str, Any], str, int]] = [
    ("llama-3.1-8b", {}, {}, "bf16", 1),
    ("llama-3.1-8b", {}, {"checkpoint_every": 1}, "bf16", 1),
    ("llama-3.1-8b", {}, {"checkpoint_every": 2}, "pure-bf16", 2),
    ("qwen3-8b", {}, {}, "fp32", 1),
    ("gemma-2-9b", {}, {}, "bf16", 1),
    ("gpt2-xl", {}, {"checkpoint_every": 1}, "fp16", 1),
    ("llama-3.1-8b", {"data": 8}, {"checkpoint_every": 1}, "bf16", 1),
    ("llama-3.1-8b", {"data": 8}, {}, "bf16", 3),
    ("llama-3.1-8b", {"data": 8, "zero": 1}, {"checkpoint_every": 1}, "bf16", 3),
    ("llama-3.1-8b", {"data": 8, "zero": 2}, {}, "bf16", 1),
    ("llama-3.1-8b", {"data": 8, "zero": 3}, {"checkpoint_every": 1}, "bf16", 1),
    ("llama-3.1-8b", {"data": 8, "zero": 3}, {}, "pure-bf16", 2),
    ("llama-3.1-8b", {}, {"optimizer_states": "8bit"}, "bf16", 1),
    ("llama-3.1-8b", {}, {"optimizer_states": "fp32", "rounding": "stochastic"}, "pure-bf16", 1),
    ("llama-3.1-8b", {"data": 8}, {"optimizer_states": "bf16", "checkpoint_every": 1}, "bf16", 2),
    ("llama-3.1-8b", {"data": 8, "zero": 3}, {"optimizer_states": "8bit"}, "bf16", 1),
    ("qwen3-0.6b", {}, {"optimizer_states": "factored"}, "fp32", 2),
    ("llama-3.1-8b", {}, {"update_in_backward": True, "checkpoint_every": 1}, "bf16", 1),
    ("llama-3.1-8b", {}, {"update_in_backward": True, "optimizer_states": "8bit"}, "pure-bf16", 1),
    ("llama-3.2-1b", {}, {"update_in_backward": True, "checkpoint_every": 1}, "fp32", 1),
    ("llama-3.2-1b", {}, {"matmul": "fp8-row"}, "bf16", 1),
    ("llama-3.2-1b", {}, {"matmul": "fp8-tensor"}, "bf16", 1),
    ("gpt2-xl", {}, {}, "bf16", 1),
    ("llama-3.2-1b", {}, {"matmul": "fp8-tensor", "checkpoint_every": 1}, "bf16", 1),
    ("llama-3.2-1b", {}, {"offload": "optimizer"}, "bf16", 1),
    ("llama-3.2-3b", {}, {"offload": "optimizer", "checkpoint_every": 1}, "pure-bf16", 2),
    ("llama-3.1-8b", {}, {"offload": "optimizer", "update_in_backward": True, "checkpoint_every": 1}, "bf16", 1),
    ("llama-3.2-3b", {}, {"offload": "optimizer", "offload_keep_bytes": 6 * 10**9}, "bf16", 1),
    ("llama-3.2-1b", {}, {"offload": "optimizer", "optimizer_states": "8bit"}, "bf16", 1),
    ("llama-3.1-8b", {"data": 8}, {"offload": "optimizer", "checkpoint_every": 1}, "bf16", 2),
    ("llama-3.1-8b", {"data": 8, "zero": 1}, {"offload": "optimizer"}, "bf16", 2),
    ("llama-3.1-8b", {"data": 4, "zero": 2}, {"offload": "optimizer", "checkpoint_every": 1}, "pure-bf16", 1),
    ("llama-3.1-8b", {"tensor": 4}, {"offload": "weights", "checkpoint_every": 1}, "bf16", 1),
    ("llama-3.1-8b", {"data": 8}, {"offload": "weights", "checkpoint_every": 1}, "bf16", 2),
    ("llama-3.1-8b", {"data": 8, "zero": 3}, {"offload": "optimizer", "checkpoint_every": 1}, "bf16", 1),
    ("llama-3.1-8b", {"data": 8, "zero": 3}, {"offload": "optimizer", "checkpoint_every": 1}, "bf16", 3),
    ("llama-3.1-8b", {"tensor": 4}, {"offload": "optimizer", "checkpoint_every": 1}, "bf16", 1),
    ("llama-3.1-8b", {"data": 8, "zero": 3}, {"update_in_backward": True, "checkpoint_every": 1}, "bf16", 1),
    ("llama-3.1-8b", {"data": 8, "zero": 2}, {"update_in_backward": True, "checkpoint_every": 1}, "pure-bf16", 1),
    (
        "llama-3.1-8b",
        {"data": 8, "zero": 3},
        {"offload": "optimizer", "update_in_backward": True, "checkpoint_every": 1},
        "bf16",
        1,
    ),
    ("llama-3.2-3b", {}, {"offload": "weights", "checkpoint_every": 1}, "bf16", 1),
    ("llama-3.1-8b", {}, {"offload": "weights", "checkpoint_every": 1, "update_in_backward": True}, "bf16", 1),
    ("llama-3.2-1b", {}, {"offload": "weights", "checkpoint_every": 1, "update_in_backward": True}, "pure-bf16", 1),
]


@sampled(5)
@pytest.mark.parametrize(("model", "layout", "levers", "precision", "accumulation"), covering(CASES))
def test_the_peak_is_the_simulations(
    model: str, layout: dict[str, Any], levers: dict[str, Any], precision: Any, accumulation: int
) -> None:
    spec = replace(preset(model), layers=4)
    spec = replace(spec, window_layers=tuple(layer for layer in spec.window_layers if layer < 4))
    given, levers_given = Layout.model_validate({"micro_batch": 2, **layout}), Levers.model_validate(levers)
    batch = 2 * given.data * accumulation
    workload = Workload(spec=spec, sequence_length=1024, global_batch=batch, precision=precision)
    found = training_ledger(workload, given, levers_given, Overheads(context_bytes=0, slack_share=0, fsdp2=installed()))
    truth = rehearse(workload, given, levers_given)
    assert found.peak_allocated_bytes() == pytest.approx(truth.peak_allocated_bytes(), rel=0.01)
    for phase in PHASES:
        assert found.allocated_bytes(phase) == pytest.approx(truth.allocated_bytes(phase), rel=0.06), phase
    assert found.allocated_bytes("backward", place="host") == pytest.approx(
        truth.allocated_bytes("backward", place="host"), rel=0.03
    )
    if levers_given.offload != "none":
        assert truth.allocated_bytes("backward", place="host") > 2**30


@pytest.mark.parametrize(
    ("model", "length", "precision"), [thorough("mistral-7b", 4096, "bf16"), ("llama-2-7b", 2048, "pure-bf16")]
)
def test_gradients_that_wait_for_the_host_stop_growing(model: str, length: int, precision: Any) -> None:
    """With updates inside backward so many bytes of them wait for the link: backward is fullest a few layers in."""
    workload = Workload(
        spec=replace(preset(model), layers=10), sequence_length=length, global_batch=1, precision=precision
    )
    layout = Layout(micro_batch=1)
    levers = Levers(offload="weights", checkpoint_every=1, update_in_backward=True)
    found = training_ledger(workload, layout, levers, Overheads(context_bytes=0, slack_share=0, fsdp2=installed()))
    truth = rehearse(workload, layout, levers)
    assert found.peak_allocated_bytes() == pytest.approx(truth.peak_allocated_bytes(), rel=0.01)
    assert found.allocated_bytes("backward") == pytest.approx(truth.allocated_bytes("backward"), rel=0.01)
    assert truth.allocated_bytes("backward") > truth.allocated_bytes("loss")
