"""What the gate is given to check: the job or plan that is asked for, overrides and all, without what rounds."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.plan.questions import planned, question
from tightfit.errors import UserError
from tightfit.jobs.adapter import AdapterTraining
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.load import load_job
from tightfit.jobs.quantize import Quantize
from tightfit.models.presets import preset
from tightfit.plan.answer import answer
from tightfit.prove.check_target import SETTINGS, CheckTarget, exact_target, miniature, target_of
from tightfit.prove.question import read_question

PINS = ("layout.data=4", "layout.tensor=2", "layout.pipeline=1", "layout.micro_batch=1", "levers.checkpoint_every=1")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    found = planned("llama-3.1-8b", "8xH100-80GB", 4096, 64, *PINS).plan
    assert found is not None
    found.save(path)
    return path


def read_target(path: Path, overrides: Sequence[str] = ()) -> CheckTarget:
    return target_of(read_question(path, overrides))


def test_a_plan_is_checked_as_it_is(plan: Path) -> None:
    found = read_target(plan)
    assert (found.layout.data, found.layout.tensor, found.levers.checkpoint_every) == (4, 2, 1)
    assert (found.spec.layers, found.length, found.passes) == (32, 4096, 3)


def test_overrides_change_a_plan_too(plan: Path) -> None:
    found = read_target(plan, ["layout.tensor=4", "layout.data=2", "optimizer.clip_norm=0.5"])
    assert (found.layout.data, found.layout.tensor, found.levers.checkpoint_every) == (2, 4, 1)
    assert (found.spec, found.settings.clip_norm) == (read_target(plan).spec, 0.5)
    with pytest.raises(UserError, match=r"unknown field layout\.tensr"):
        read_target(plan, ["layout.tensr=4"])


def test_a_job_is_checked_with_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("model: tiny-llama\ndata: x\noutput: y\nsteps: 1\nglobal_batch: 16\nlayout: {data: 2}\n")
    changes = ["layout.micro_batch=4", "data.sequence_length=64", "optimizer.clip_norm=2"]
    found = read_target(file, changes)
    assert (found.passes, found.length, found.settings.clip_norm) == (2, 64, 2)
    assert found == target_of(load_job(file, changes))


def test_a_job_of_adapters_is_checked_with_them(tmp_path: Path) -> None:
    """Without what is drawn at random, and on plain weights; of a plan, too."""
    file = tmp_path / "job.yaml"
    adapter = "{rank: 16, alpha: 3, bits: 4, dropout: 0.1, targets: '.*(q|v)_proj'}"
    file.write_text(f"model: tiny-llama\ndata: x\noutput: y\nsteps: 1\nlayout: {{data: 2}}\nadapter: {adapter}\n")
    found = read_target(file)
    wanted = AdapterTraining(rank=16, alpha=3, targets=[".*(q|v)_proj"])
    assert found.adapter == wanted
    assert miniature(found).adapter == wanted.model_copy(update={"rank": 4})
    asked = question("llama-3.1-8b", "8xH100-80GB", 4096, 64, "layout.data=8").with_adapters({"rank": 16, "bits": 4})
    plan = answer(asked).plan
    assert plan is not None
    plan.save(tmp_path / "plan.json")
    assert read_target(tmp_path / "plan.json").adapter.rank == 16
    assert read_target(tmp_path / "plan.json").adapter.bits is None


def test_a_job_that_prunes_is_checked_with_it(tmp_path: Path) -> None:
    """A job's optimizer.l1 and keep_zeros, and those of the plan that was made of it; what is left out is named."""
    file = tmp_path / "job.yaml"
    file.write_text("model: tiny-llama\ndata: x\noutput: y\nsteps: 1\nlayout: {data: 2}\noptimizer: {l1: 0.5}\n")
    rounds = ["quantize.bits=4", "quantize.group=16", "distill.teacher=model"]
    found = read_target(file, ["optimizer.keep_zeros=true", "optimizer.lr=1"])
    assert (found.settings.l1, found.settings.keep_zeros, found.settings.lr) == (0.5, True, SETTINGS.lr)
    assert found.left_out == ()
    assert read_target(file, rounds).left_out == ("quantize", "distill")
    asked = question("tiny-llama", "8xH100-80GB", 64, 64, "layout.data=8")
    workload = replace(asked.workload, shrinks=True, rounding=Quantize(bits=4).rounding)
    plan = answer(replace(asked, workload=workload, job={"optimizer": {"l1": 0.5}})).plan
    plan.save(tmp_path / "plan.json")
    assert read_target(tmp_path / "plan.json").settings.l1 == 0.5
    assert read_target(tmp_path / "plan.json").left_out == ("quantize",)


def test_a_job_that_would_not_be_trained_is_not_checked(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("model: tiny-llama\ndata: x\noutput: y\nsteps: 1\nlayout: {tensor: 2}\nquantize: {bits: 4}\n")
    with pytest.raises(
        UserError, match=r"quantize.bits rounds whole weights .*layout.tensor is 2; set layout.tensor=1"
    ):
        read_target(file)


def test_what_rounds_is_left_out_and_nothing_else() -> None:
    kept = {"checkpoint_every": 1, "offload_checkpoints": True, "loss_chunk_bytes": 1, "tiles": 2}
    rounding = {"optimizer_states": "8bit", "rounding": "stochastic", "matmul": "fp8-row", "checkpoint_format": "fp8"}
    target = CheckTarget(preset("tiny-llama"), Layout(), Levers.model_validate(kept | rounding))
    assert exact_target(target) == replace(target, levers=Levers.model_validate(kept))
    assert exact_target(target).left_out == tuple(f"levers.{name}" for name in rounding)


def test_updates_inside_backward_are_compared_unclipped() -> None:
    """What clips there is an estimate, which one process does not need."""
    target = CheckTarget(preset("tiny-llama"), Layout(), Levers(update_in_backward=True))
    assert exact_target(target) == replace(target, settings=SETTINGS.model_copy(update={"clip_norm": 0.0}))
