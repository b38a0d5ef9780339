"""Plans of adapters: what fits, what it takes beside training the model, what is refused, and the job that runs it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tightfit.cli.main import app
from tightfit.errors import UserError
from tightfit.hardware.machine import parse_machine
from tightfit.jobs.adapter import AdapterTraining
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.models.presets import preset
from tightfit.plan.answer import Question, answer
from tightfit.plan.cost import Costs
from tightfit.plan.job import job_of_plan
from tightfit.plan.mfu import token_flops
from tightfit.plan.plan import Plan

SPEC = preset("llama-3.1-8b")


def workload(**settings: Any) -> Workload:
    made = Workload(spec=SPEC, sequence_length=2048, global_batch=8)
    return replace(made, adapted=AdapterTraining.model_validate(settings).adapted()) if settings else made


def planned(machine: str, **settings: Any) -> Plan:
    asked = replace(workload(**settings), precision="fp16" if machine == "T4" else "bf16")
    question = Question(model="llama-3.1-8b", workload=asked, machine=parse_machine(machine, None))
    return answer(question).plan


def test_what_fits_a_card_of_24_gigabytes() -> None:
    """The model itself does not, without the host; adapters on 16 bits just do, on 4 bits with room to spare."""
    packed, plain = planned("RTX3090", rank=16, bits=4), planned("RTX3090", rank=16)
    assert packed.fits
    assert plain.fits
    assert packed.levers.offload == plain.levers.offload == "none"
    assert packed.time.recompute_s < plain.time.recompute_s
    whole = planned("RTX3090")
    assert not whole.fits or whole.levers.offload != "none"
    assert planned("T4", rank=16, bits=4).fits
    assert not planned("T4", rank=16).fits


def test_data_ranks_alone_share_the_work() -> None:
    plan = planned("4xRTX3090", rank=16, bits=4)
    assert plan.fits
    assert (plan.layout.data, plan.layout.zero, plan.layout.splits) == (4, 0, {})


def test_a_step_has_two_thirds_of_the_operations() -> None:
    layout, levers = Layout(micro_batch=4), Levers()
    machine = parse_machine("H100-80GB", None)
    times = {
        name: Costs(workload(**settings), machine).step(layout, levers)
        for name, settings in {"whole": {}, "plain": {"rank": 16}, "packed": {"rank": 16, "bits": 4}}.items()
    }
    assert 0.6 < times["plain"].compute_s / times["whole"].compute_s < 1.0
    assert 1.0 < times["packed"].compute_s / times["plain"].compute_s < 1.2
    assert times["plain"].optimizer_s < times["whole"].optimizer_s / 10
    assert token_flops(SPEC, 2048, frozen=True) < 0.7 * token_flops(SPEC, 2048)


def test_fewer_targets_take_less_time_and_memory() -> None:
    some, every = planned("H100-80GB", rank=16, targets=["q", "v"]), planned("H100-80GB", rank=16)
    assert some.step_seconds < every.step_seconds
    assert some.workload.adapted is not None
    assert some.workload.adapted.params(SPEC) == 32 * 16 * (4096 + 4096 + 4096 + 1024)


def test_a_plan_is_saved_and_becomes_a_job(tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    asked = ["plan", "tiny-llama", "--on", "RTX3090", "--seq", "64", "--global-batch", "2"]
    made = CliRunner().invoke(app, [*asked, "--adapter", "8", "--bits", "4", "--save", str(saved)])
    assert made.exit_code == 0
    assert "rank 8 on all projections" in made.output
    plan = Plan.load(saved)
    assert plan.workload.adapted == AdapterTraining(rank=8, bits=4).adapted()
    job = job_of_plan(plan, str(saved), ["data.train=x.txt", f"output={tmp_path}", "steps=3"])
    assert (job.adapter.rank, job.adapter.bits) == (8, 4)
    assert isinstance(CliRunner().invoke(app, [*asked, "--bits", "4"]).exception, UserError)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rank": 16, "bits": 5}, "adapter.bits is 5, but it should be 2, 4 or 8$"),
        ({"rank": 0}, "adapter.rank is 0, but it should be"),
    ],
)
def test_what_is_no_adapter_is_refused(fields: dict[str, int], said: str) -> None:
    asked = Question(model="llama-3.1-8b", workload=workload(), machine=parse_machine("H200", None))
    with pytest.raises(UserError, match=said):
        asked.with_adapters(fields)
    other = replace(asked, workload=replace(asked.workload, engine_name="megatron"))
    with pytest.raises(UserError, match="own engine"):
        other.with_adapters({"rank": 4})


def test_fewer_bits_of_the_frozen_model_are_among_what_would_fit() -> None:
    asked = Question(model="llama-3.1-8b", workload=workload(), machine=parse_machine("RTX3060", None))
    plain = answer(asked.with_adapters({"rank": 16}))
    assert not plain.plan.fits
    [found] = [change.to for change in plain.changes if change.what == "fewer bits of the frozen model"]
    assert found == "--bits 8 (lossy)"
    assert planned("RTX3060", rank=16, bits=8).fits


def test_options_change_the_adapters_of_a_job_file(tmp_path: Path) -> None:
    job, saved = tmp_path / "job.yaml", tmp_path / "plan.json"
    job.write_text(
        "model: tiny-llama\ndata: {train: x.txt, sequence_length: 64}\noutput: run\nsteps: 1\nprecision: bf16\n"
        "adapter: {rank: 8, targets: [q, v]}\n"
    )
    made = CliRunner().invoke(app, ["plan", str(job), "--on", "RTX3090", "--bits", "4", "--save", str(saved)])
    assert made.exit_code == 0
    assert Plan.load(saved).workload.adapted == AdapterTraining(rank=8, bits=4, targets=["q", "v"]).adapted()


def test_who_cannot_train_the_whole_model_is_told_of_adapters() -> None:
    """With the memory and time of the plan that `--adapter` then makes; with adapters already, nothing is told."""
    asked = Question(model="llama-3.1-8b", workload=workload(), machine=parse_machine("RTX3090", None))
    whole = answer(asked)
    assert whole.plan.training_host_bytes > 2**30
    small = answer(asked.with_adapters({"rank": 16})).plan
    [told] = [note for note in whole.notes if "adapter" in note]
    assert "--adapter 16 (LoRA)" in told
    assert f"{small.gpu_peak_bytes / 2**30:.2f} GiB a GPU, {small.step_seconds:.3g} s a step" in told
    card = replace(asked, machine=parse_machine("RTX3060", "32GB"))
    narrow = answer(card)
    assert not narrow.plan.fits
    assert any("--adapter 16 --bits 4 (QLoRA)" in note for note in narrow.notes)
    for other in (
        replace(card, workload=replace(card.workload, engine_name="hf")),
        replace(asked, machine=parse_machine("H200", None)),
        asked.with_adapters({"rank": 16}),
        replace(asked, model="mixtral-8x7b", workload=replace(workload(), spec=preset("mixtral-8x7b"))),
    ):
        assert not any("adapter" in note for note in answer(other).notes)
