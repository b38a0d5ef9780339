"""Formulas of expert ranks against the real step on fake ranks, in balance: peak and phases."""

from dataclasses import replace
from typing import Any

import pytest

from tests.covering import covering, sampled
from tightfit.jobs.experts import ExpertTraining
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.fsdp2 import installed
from tightfit.memory.formulas.overheads import Overheads
from tightfit.memory.formulas.training import training_ledger
from tightfit.memory.ledger import Phase
from tightfit.models.presets import preset
from tightfit.models.spec import ModelSpec
from tightfit.prove.rehearsal import rehearse

PHASES: tuple[Phase, ...] = ("forward", "loss", "backward", "optimizer")
CHECKPOINTED = {"checkpoint_every": 1}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str, int]] = {
    "ddp": ("qwen3-30b-a3b", {"data": 8, "expert": 8}, {}, "pure-bf16", 1),
    "capacity": ("qwen3-30b-a3b", {"data": 8, "expert": 8}, {}, "pure-bf16", 1),
    "capacity-alone": ("qwen3-30b-a3b", {}, CHECKPOINTED, "pure-bf16", 1),
    "ddp-accumulated": ("qwen3-30b-a3b", {"data": 8, "expert": 4}, CHECKPOINTED, "bf16", 2),
    "zero-1-alone": ("mixtral-8x7b", {"data": 8, "expert": 8, "zero": 1}, CHECKPOINTED, "bf16", 1),
    "zero-1-accumulated": ("qwen3-30b-a3b", {"data": 8, "expert": 4, "zero": 1}, {}, "bf16", 2),
    "zero-3": ("qwen3-30b-a3b", {"data": 8, "expert": 8, "zero": 3}, {}, "bf16", 1),
    "zero-3-checkpointed": ("qwen3-30b-a3b", {"data": 8, "expert": 4, "zero": 3}, CHECKPOINTED, "bf16", 2),
    "uneven-zero-1": ("mixtral-8x7b", {"data": 6, "zero": 1}, CHECKPOINTED, "bf16", 1),
    "uneven-zero-1-accumulated": ("mixtral-8x7b", {"data": 6, "zero": 1}, {}, "bf16", 2),
    "uneven-zero-3": ("mixtral-8x7b", {"data": 16, "zero": 3}, CHECKPOINTED, "bf16", 1),
    "uneven-expert-ranks": ("mixtral-8x7b", {"data": 12, "expert": 2, "zero": 3}, CHECKPOINTED, "bf16", 1),
    "sinks": ("gpt-oss-20b", {"data": 2, "expert": 2, "tensor": 2}, {}, "pure-bf16", 1),
    "tensor": ("mixtral-8x7b", {"data": 4, "expert": 2, "tensor": 2}, {}, "pure-bf16", 1),
}


def trained(spec: ModelSpec, name: str) -> ModelSpec:
    """Four layers; with a capacity and a z-loss where the case says so."""
    spec = replace(spec, layers=4)
    return ExpertTraining(z_loss=1e-3, capacity_factor=0.7).applied(spec) if "capacity" in name else spec


@sampled(4)
@pytest.mark.parametrize("name", covering(CASES))
def test_the_peak_is_the_simulations(name: str) -> None:
    model, degrees, levers, precision, accumulation = CASES[name]
    spec = trained(preset(model), name)
    layout = Layout.model_validate({"micro_batch": 1, **degrees})
    workload = Workload(
        spec=spec,
        sequence_length=4096,
        global_batch=layout.data * accumulation,
        precision=precision,  # type: ignore[arg-type]
    )
    given = Levers.model_validate(levers)
    found = training_ledger(workload, layout, given, Overheads(context_bytes=0, slack_share=0, fsdp2=installed()))
    truth = rehearse(workload, layout, given)
    assert found.peak_allocated_bytes() == pytest.approx(truth.peak_allocated_bytes(), rel=0.01)
    for phase in PHASES:
        assert found.allocated_bytes(phase) == pytest.approx(truth.allocated_bytes(phase), rel=0.01), phase
