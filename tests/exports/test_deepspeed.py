"""DeepSpeed files, read by DeepSpeed's own configuration class where it is installed."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.plan.questions import planned
from tightfit.errors import UserError
from tightfit.exports.deepspeed import deepspeed_config
from tightfit.exports.files import export
from tightfit.plan.plan import Plan

DATA_ONLY = ("layout.data=8",)
CASES: dict[str, tuple[Any, ...]] = {
    "zero 0": ("llama-3.2-1b", "8xH100-80GB", 1024, 64, *DATA_ONLY, "layout.zero=0"),
    "zero 1": ("llama-3.2-1b", "8xH100-80GB", 1024, 64, *DATA_ONLY, "layout.zero=1"),
    "zero 2, fp16": ("llama-3.2-1b", "8xV100-32GB", 1024, 64, *DATA_ONLY, "layout.zero=2"),
    "zero 3": ("llama-3.1-8b", "8xH100-80GB", 4096, 64, *DATA_ONLY, "layout.zero=3"),
    "optimizer on the host": ("llama-3.1-8b", "8xH100-80GB", 4096, 64, *DATA_ONLY, "levers.offload=optimizer"),
    "one GPU, all on the host": ("llama-3.1-8b", "H100-80GB", 4096, 8, "levers.offload=weights"),
}


@pytest.fixture(params=CASES.values(), ids=list(CASES))
def plan(request: pytest.FixtureRequest) -> Plan:
    return planned(*request.param).plan


def test_says_what_the_plan_says(plan: Plan) -> None:
    config: dict[str, Any] = deepspeed_config(plan)
    batch = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * plan.machine.ranks
    assert batch == config["train_batch_size"] == plan.workload.global_batch
    zero = config["zero_optimization"]
    assert zero["stage"] >= plan.layout.zero
    assert ("offload_optimizer" in zero) == (plan.levers.offload != "none")
    assert ("offload_param" in zero) == (plan.levers.offload == "weights")
    assert config[plan.workload.precision]["enabled"]


def test_deepspeed_reads_it(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed", reason="pip install --no-build-isolation deepspeed")
    from deepspeed.runtime.config import DeepSpeedConfig

    export(plan, f"deepspeed={tmp_path / 'ds.json'}")
    monkeypatch.setattr("deepspeed.runtime.config.dist.get_rank", lambda: 0)  # as inside a running job
    monkeypatch.setattr("deepspeed.runtime.config.dist.get_world_size", lambda: plan.machine.ranks)
    read = DeepSpeedConfig(str(tmp_path / "ds.json"))
    assert read.train_batch_size == plan.workload.global_batch
    assert read.train_micro_batch_size_per_gpu == plan.layout.micro_batch
    assert read.zero_config.stage == deepspeed_config(plan)["zero_optimization"]["stage"]
    offload = read.zero_config.offload_optimizer
    assert (offload is not None and str(offload.device).endswith("cpu")) == (plan.levers.offload != "none")
    assert read.bfloat16_config.enabled == (plan.workload.precision == "bf16")
    assert read.gradient_clipping == 1.0


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "context"])
def test_other_splits_are_refused(axis: str) -> None:
    split = planned("llama-3.2-1b", "8xH100-80GB", 2048, 64, f"layout.{axis}=2").plan
    with pytest.raises(UserError, match=f"data ranks only.*layout.{axis}=2"):
        deepspeed_config(split)


def test_pure_bf16_is_refused() -> None:
    pure = planned("llama-3.2-1b", "8xH100-80GB", 1024, 64, *DATA_ONLY, precision="pure-bf16").plan
    with pytest.raises(UserError, match="master weights"):
        deepspeed_config(pure)


def test_a_jobs_optimizer_is_carried_over() -> None:
    from dataclasses import replace

    plan = planned(*CASES["zero 3"]).plan
    config = deepspeed_config(replace(plan, job={"optimizer": {"lr": 1e-5, "clip_norm": 0.5}}))
    assert config["optimizer"]["params"]["lr"] == 1e-5
    assert config["gradient_clipping"] == 0.5
    json.dumps(config)
