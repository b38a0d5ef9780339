"""Jobs fitted to machines: what is picked fits, is what the job leaves open, and is said in a few lines."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.conftest import Run
from tests.covering import sampled
from tests.train.jobs import tiny_job
from tightfit.errors import UserError
from tightfit.hardware.machine import Machine, parse_machine
from tightfit.jobs.job import Job
from tightfit.jobs.levers import Levers
from tightfit.memory.formulas.overheads import INSTALLED
from tightfit.memory.formulas.training import peaks
from tightfit.prove.measured_run import measure_job
from tightfit.report.fitting import fit_beside_run
from tightfit.train.fitting import fit_job, fit_machine, with_memory

GIB = 2**30


def job_of(model: str, length: int, **changes: Any) -> Job:
    fields: dict[str, Any] = {
        "model": model,
        "data": {"train": ["nowhere"], "sequence_length": length},
        "output": "nowhere/run",
        "steps": 3,
        "global_batch": 1,
        "layout": {"micro_batch": 1},
        "levers": "auto",
    }
    return Job.model_validate({**fields, **changes})


def card(gib: float, host_gib: float = 110) -> Machine:
    return with_memory(parse_machine("H200", int(host_gib * GIB)), int(gib * GIB))


def test_auto_levers_are_a_job_to_fit() -> None:
    job = job_of("llama-3.2-1b", 2048)
    assert job.fit
    assert job.levers == Levers()
    assert not job_of("llama-3.2-1b", 2048, levers={}).fit


@sampled(2)
@pytest.mark.parametrize(
    ("model", "length", "gib"),
    [
        ("llama-3.1-8b", 2048, 22.35),
        ("llama-3.2-1b", 8192, 14.9),
        ("llama-3.1-8b", 32768, 139.8),
        ("smollm2-135m", 2048, 80),
    ],
)
def test_small_cards_train_large_models(model: str, length: int, gib: float) -> None:
    """Full-parameter training in mixed precision, which needs 16 bytes a weight and more without levers."""
    fitted = fit_machine(job_of(model, length), card(gib), "bf16")
    assert fitted.plan is not None
    assert not fitted.job.fit
    gpu, host, _ = peaks(fitted.plan.workload, fitted.job.layout, fitted.job.levers, INSTALLED)
    assert gpu <= gib * GIB
    assert host <= 110 * GIB
    assert 3 <= len(fitted.lines) <= 6
    assert all(line.startswith("fit: ") for line in fitted.lines)
    plain = peaks(fitted.plan.workload, fitted.job.layout, Levers(), INSTALLED).gpu_bytes
    assert (fitted.job.levers == Levers()) == (plain <= 0.95 * gib * GIB)


def test_what_the_job_decides_stays() -> None:
    job = job_of("llama-3.2-1b", 8192, levers={"checkpoint_every": 2, "optimizer_states": "bf16"}, fit=True)
    fitted = fit_machine(job, card(24), "bf16").job
    assert (fitted.levers.checkpoint_every, fitted.levers.optimizer_states) == (2, "bf16")
    rows = job_of("llama-3.2-1b", 4096, global_batch=8, layout={"micro_batch": 4})
    assert fit_machine(rows, card(40), "bf16").job.layout.micro_batch == 4
    free = job_of("llama-3.2-1b", 4096, global_batch=8, layout={})
    assert 8 % fit_machine(free, card(40), "bf16").job.layout.micro_batch == 0


def test_nothing_lossy_is_picked() -> None:
    levers = fit_machine(job_of("llama-3.1-8b", 2048), card(22), "bf16").job.levers
    assert (levers.optimizer_states, levers.checkpoint_format, levers.matmul) == ("auto", "exact", "native")


def test_what_cannot_fit_is_refused_with_a_way_out() -> None:
    with pytest.raises(UserError, match=r"no levers make llama-3.1-70b fit in .*; it would fit with"):
        fit_machine(job_of("llama-3.1-70b", 2048), card(16), "bf16")
    with pytest.raises(UserError, match=r"no levers make llama-3\.1-8b fit"):
        fit_machine(job_of("llama-3.1-8b", 2048), card(20, host_gib=20), "bf16")


def test_a_machine_without_a_gpu_says_so_and_trains(
    tmp_path: Path, corpus: Path, token_cache: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tiny_job(tmp_path / "run", corpus, token_cache, device="cpu")
    assert fit_job(job).plan is None
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump({**job.model_dump(mode="json"), "levers": "auto"}), encoding="utf-8")
    run = Run(capfd, monkeypatch, "train", str(file))
    assert run.code == 0
    assert run.out.startswith("fit: there is no GPU to fit into")
    saved = yaml.safe_load((tmp_path / "run" / "job.yaml").read_text(encoding="utf-8"))
    assert saved["fit"] is False


def test_the_plan_is_laid_beside_measured_steps(tmp_path: Path, corpus: Path, token_cache: Path) -> None:
    """On this CPU the measured ledger has tensors alone; states are the same to the byte wherever they are."""
    job = tiny_job(tmp_path / "run", corpus, token_cache, global_batch=2, device="cpu", fit=True)
    fitted = fit_machine(job, card(80), "fp32")
    found, comparison = fit_beside_run(fitted)
    assert (found.run / "ledger.json").is_file()
    assert found.ledger == measure_job(fitted.job, 2, quiet=True).ledger
    lines = {(pair.phase, pair.component): pair for pair in comparison.pairs}
    states = lines["forward", "optimizer states"]
    assert states.error == pytest.approx(0, abs=0.01)
    assert lines["backward", "weights"].error == pytest.approx(0, abs=0.01)
