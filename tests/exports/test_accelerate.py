"""accelerate files, read by accelerate's own launcher and turned into its FSDP plugin."""

import os
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.dataclasses import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from torch.distributed.fsdp import CPUOffloadPolicy

from tests.plan.questions import planned
from tightfit.errors import UserError
from tightfit.exports.accelerate import accelerate_config
from tightfit.exports.files import export
from tightfit.plan.plan import Plan

CASES = {
    "zero 2": ("llama-3.2-1b", "8xH100-80GB", 1024, 64, "layout.data=8", "layout.zero=2"),
    "zero 3": ("llama-3.1-8b", "8xH100-80GB", 4096, 64, "layout.data=8", "layout.zero=3"),
    "zero 3, checkpointed": (
        "llama-3.1-8b",
        "2x8xH100-80GB",
        4096,
        64,
        "layout.data=16",
        "layout.zero=3",
        "levers.checkpoint_every=1",
    ),
    "fp16": ("llama-3.1-8b", "8xV100-32GB", 512, 64, "layout.data=8", "layout.zero=3"),
    "offloaded": ("llama-3.1-8b", "8xH100-80GB", 4096, 64, "layout.data=8", "levers.offload=weights"),
}


def written(plan: Plan, folder: Path) -> str:
    path = folder / f"fsdp-{plan.layout.data}.yaml"
    export(plan, f"accelerate={path}")
    return str(path)


@pytest.mark.parametrize("asked", CASES.values(), ids=list(CASES))
def test_the_launcher_makes_the_plans_plugin_of_it(
    asked: tuple[str, str, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(*asked).plan
    arguments = launch_command_parser().parse_args(["--config_file", written(plan, tmp_path), "train.py"])
    arguments, defaults, _ = _validate_launch_command(arguments)
    assert (defaults.num_processes, defaults.num_machines) == (plan.machine.ranks, plan.machine.nodes)
    assert arguments.mixed_precision == plan.workload.precision
    environment = prepare_multi_gpu_env(arguments)
    monkeypatch.setattr(os, "environ", {**os.environ, **environment})
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward == (plan.layout.zero == 3)
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy) == (plan.levers.offload != "none")
    assert plugin.activation_checkpointing == (plan.levers.checkpoint_every > 0)


def test_plain_replicas_and_one_gpu_need_no_fsdp(tmp_path: Path) -> None:
    replicas = planned("llama-3.2-1b", "8xH100-80GB", 1024, 64, "layout.data=8", "layout.zero=0").plan
    assert load_config_from_file(written(replicas, tmp_path)).distributed_type == "MULTI_GPU"
    alone = planned("llama-3.2-1b", "H100-80GB", 1024, 64).plan
    assert load_config_from_file(written(alone, tmp_path)).distributed_type == "NO"


def test_what_fsdp_has_not_is_refused() -> None:
    split = planned("llama-3.2-1b", "8xH100-80GB", 2048, 64, "layout.tensor=2").plan
    with pytest.raises(UserError, match="data ranks only"):
        accelerate_config(split)
    pins = ("layout.data=8", "layout.zero=0", "levers.offload=optimizer")
    states = planned("llama-3.2-1b", "8xH100-80GB", 2048, 64, *pins).plan
    with pytest.raises(UserError, match=r"levers.offload=weights"):
        accelerate_config(states)
