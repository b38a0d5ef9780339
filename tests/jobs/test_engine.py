"""Engines: ours is unchanged by them, Hugging Face's is what was measured, and their plans are ones they can run."""

import csv
from dataclasses import replace

import pytest

from benchmarks.reports.documentation import RESULTS
from tests.plan.questions import question
from tightfit.errors import UserError
from tightfit.exports.estimate import engine_estimate
from tightfit.hardware.machine import parse_machine
from tightfit.jobs.engine import ENGINES, EngineName, find_engine
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.training import peaks, training_ledger
from tightfit.models.resolve import resolve_spec
from tightfit.plan.answer import answer
from tightfit.plan.cost import Costs
from tightfit.plan.plan import Plan

GIB = 2**30


def huggingface_rows() -> dict[tuple[str, ...], dict[str, str]]:
    """The newest measured row of each of Hugging Face's cases."""
    with (RESULTS / "memory_truth.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["implementation"] == "huggingface" and row["measured_gib"]]
    return {(row["model"], row["sequence_length"], row["checkpoint_every"]): row for row in rows}


@pytest.mark.parametrize(
    "row", huggingface_rows().values(), ids=lambda row: f"{row['model']} {row['checkpoint_every']}"
)
def test_huggingface_takes_what_was_measured(row: dict[str, str]) -> None:
    workload = Workload(
        spec=resolve_spec(row["model"]),
        sequence_length=int(row["sequence_length"]),
        global_batch=int(row["micro_batch"]),
        precision=row["precision"],  # type: ignore[arg-type]
        engine_name="hf",
    )
    layout, levers = Layout(micro_batch=workload.global_batch), Levers(checkpoint_every=int(row["checkpoint_every"]))
    allocated = training_ledger(workload, layout, levers).peak_allocated_bytes()
    assert allocated / GIB == pytest.approx(float(row["measured_gib"]), rel=0.06)
    step_ms = 1e3 * Costs(workload, parse_machine("H200")).step(layout, levers).step_s
    assert step_ms == pytest.approx(float(row["measured_step_ms"]), rel=0.08)


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "tightfit"])
def test_others_take_more_of_both(name: EngineName) -> None:
    ours = question("llama-3.1-8b", "8xA100-80GB", 4096, 16).workload
    theirs = replace(ours, engine_name=name)
    layout, levers, machine = Layout(data=8, zero=3, micro_batch=1), Levers(), parse_machine("8xA100-80GB")
    assert peaks(theirs, layout, levers).gpu_bytes > peaks(ours, layout, levers).gpu_bytes
    assert Costs(theirs, machine).step(layout, levers).step_s > 0.95 * Costs(ours, machine).step(layout, levers).step_s


def test_plans_are_ones_that_the_engine_can_run() -> None:
    asked = question("llama-3.1-8b", "8xA100-40GB", 4096, 16)
    asked = replace(asked, workload=replace(asked.workload, engine_name="hf"))
    found = answer(asked)
    layout, levers = found.plan.layout, found.plan.levers
    assert (layout.tensor, layout.pipeline, layout.context) == (1, 1, 1)
    assert levers.checkpoint_every in (0, 1)
    assert (levers.tiles, levers.offload, levers.loss) == (1, "none", "plain")
    assert any("Hugging Face" in note for note in found.notes)


def test_exports_are_estimated_for_who_runs_them() -> None:
    plan = answer(question("llama-3.1-8b", "8xA100-80GB", 4096, 64)).plan
    estimate = engine_estimate(plan, "hf")
    assert estimate.gpu_bytes > plan.gpu_peak_bytes
    assert "Hugging Face" in str(estimate)


def test_an_engine_is_not_pinned_to_what_it_does_not_split() -> None:
    with pytest.raises(UserError, match=r"layout.pipeline is pinned to 2, but Hugging Face's models .* has 1; drop"):
        planned_for("hf", "layout.pipeline=2")
    assert planned_for("hf", "layout.pipeline=1", "layout.zero=3").layout.zero == 3
    assert planned_for("megatron", "layout.pipeline=2").layout.pipeline == 2


def planned_for(engine: EngineName, *pins: str) -> Plan:
    return answer(question("llama-3.2-1b", "4xA100-80GB", 512, 8, *pins, engine=engine)).plan


def test_an_unknown_engine_is_a_sentence() -> None:
    with pytest.raises(UserError, match=r"--engine is 'horovod'; give one of tightfit, hf, deepspeed"):
        find_engine("horovod")


@pytest.mark.parametrize(("engine", "of_all_tokens"), [("megatron", 0.5), ("tightfit", 1.0)])
def test_tensor_ranks_send_experts_all_tokens_or_their_part_of_the_sequence(
    engine: EngineName, of_all_tokens: float
) -> None:
    """Megatron's dispatcher sends tokens / t of a split sequence, ours all of them to ranks with the same columns."""
    asked = question("qwen3-30b-a3b", "4x8xH100-80GB", 4096, 64)
    costs = Costs(replace(asked.workload, engine_name=engine), asked.machine)
    whole = Layout(data=16, tensor=2, expert=16, micro_batch=1, sequence_parallel=False)
    split = whole.model_copy(update={"sequence_parallel": True})
    share = costs.step(split, Levers()).expert_s / costs.step(whole, Levers()).expert_s
    assert share == pytest.approx(of_all_tokens, rel=0.02)  # a call's latency does not shrink
