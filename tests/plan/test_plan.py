"""A plan is a file: what is saved is what is loaded, and anything else is one sentence."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.covering import sampled
from tests.plan.questions import planned
from tightfit.errors import UserError
from tightfit.jobs.adapter import Adapted, FrozenBase
from tightfit.jobs.job import Job
from tightfit.jobs.quantize import WeightRounding
from tightfit.jobs.teacher import Teacher
from tightfit.memory.formulas.overheads import INSTALLED
from tightfit.memory.formulas.training import peaks, training_ledger
from tightfit.models.presets import preset
from tightfit.models.quantized.scheme import Scheme
from tightfit.plan.plan import Plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned("llama-3.1-8b", "2x8xA100-80GB:pcie:hdr", 4096, 64, host="512GB").plan


def test_several_gpus_are_said_to_be_unproven() -> None:
    words = "`tightfit doctor`"
    assert any(words in note for note in planned("llama-3.2-1b", "2xA100-80GB", 512, 8).notes)
    assert not any(words in note for note in planned("llama-3.2-1b", "A100-80GB", 512, 8).notes)


def test_round_trip(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@sampled(3)
@pytest.mark.parametrize(
    "model", ["mixtral-8x7b", "gemma-3-1b", "phi-3-mini-128k", "gpt2", "tiny-qwen2-moe", "deepseek-v2-lite"]
)
def test_every_family_of_models_goes_through_json(model: str, tmp_path: Path) -> None:
    made = planned(model, "8xH200", 256, 8).plan
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").workload == made.workload


def test_what_is_trained_beside_the_model_goes_through_json(plan: Plan, tmp_path: Path) -> None:
    spec = preset("tiny-deepseek-v2")
    held = FrozenBase(scheme=Scheme(bits=4, group=64, symmetric=False), coded_bytes=7)
    workload = replace(
        plan.workload,
        teacher=Teacher(spec=spec, weight_bytes=9, place="host", features=1),
        rounding=WeightRounding(bits=4, group=64, learned=True),
        adapted=Adapted(rank=4, projections=("q", "v"), base=held),
    )
    replace(plan, workload=workload).save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").workload == workload


def test_the_ledger_is_the_plans(plan: Plan) -> None:
    assert plan.ledger == training_ledger(plan.workload, plan.layout, plan.levers, INSTALLED)
    assert plan.ledger.peak_bytes() == pytest.approx(plan.gpu_peak_bytes, rel=1e-6)
    assert peaks(plan.workload, plan.layout, plan.levers, INSTALLED).gpu_bytes == plan.gpu_peak_bytes
    assert plan.tokens_per_second == pytest.approx(64 * 4096 / plan.step_seconds)


def test_job_fields_make_a_job(plan: Plan, tmp_path: Path) -> None:
    fields = plan.job_fields()
    fields["data"]["train"] = ["notes.txt"]
    job = Job.model_validate({**fields, "steps": 3, "output": str(tmp_path)})
    assert (job.layout, job.levers, job.global_batch) == (plan.layout, plan.levers, 64)
    assert (job.data.sequence_length, job.precision, job.model.source) == (4096, "bf16", "llama-3.1-8b")


def broken(plan: Plan, **changes: Any) -> str:
    return json.dumps({**plan.to_json(), **changes})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json", ["not JSON"]),
        ("[]", ["not a plan"]),
        ("{}", ["not a plan", "format"]),
        ('{"format": 99}', ["99"]),
    ],
)
def test_other_files_are_one_sentence(text: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UserError) as error:
        Plan.load(tmp_path / "plan.json")
    for word in ["plan.json", *words]:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": {"data": 0}},
        {"levers": {"offload": "tape"}},
        {"machine": {"text": "8xNothing", "host_bytes": None}},
        {"time": {"compute_s": 1.0}},
        {"ledger": {"source": "dreams", "lines": []}},
        {"workload": None},
        {"workload": {"spec": {}}},
        {"gpu_peak_bytes": "much"},
        {"job": 3},
        {"layout": []},
    ],
    ids=str,
)
def test_hostile_plans_are_one_sentence(plan: Plan, changes: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(broken(plan, **changes))
    with pytest.raises(UserError) as error:
        Plan.load(tmp_path / "plan.json")
    assert "plan.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_and_unwritable_places(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read plan"):
        Plan.load(tmp_path / "absent.json")
    with pytest.raises(UserError, match="cannot write plan"):
        plan.save(tmp_path / "absent" / "plan.json")


def test_a_simulation_confirms_or_refutes(plan: Plan) -> None:
    found = plan.confirmed(plan.ledger)
    assert found["fits"] == plan.fits
    assert found["gpu_peak_bytes"] == plan.ledger.peak_bytes()


def test_lists_inside_lists_inside_lists_are_one_sentence(plan: Plan) -> None:
    """Parsers of some Pythons go deeper than a function may call itself."""
    data = plan.to_json()
    nested: Any = []
    for _ in range(2 * sys.getrecursionlimit()):
        nested = [nested]
    data["workload"]["spec"]["rope"]["long_factor"] = nested
    with pytest.raises(UserError, match=r"^here is not a plan \(maximum recursion"):
        Plan.from_json(data, "here")


def test_a_number_that_no_float_holds_is_one_sentence(plan: Plan) -> None:
    data = plan.to_json()
    data["time"]["compute"] = 10**400
    with pytest.raises(UserError, match=r"^here is not a plan \(int too large"):
        Plan.from_json(data, "here")


@pytest.mark.parametrize(("card", "vendor"), [("MI300X-192GB", "AMD"), ("M2Ultra-192GB", "Apple"), ("T4-16GB", "")])
def test_cards_that_nobody_has_run_on_are_named(card: str, vendor: str) -> None:
    told = [note for note in planned("smollm2-135m", card, 512, 4).notes if "nobody has run tightfit" in note]
    assert [f"on {vendor} cards" in note for note in told] == [True] * bool(vendor)
