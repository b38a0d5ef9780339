"""A plan as an accelerate configuration (`accelerate launch --config_file fsdp.yaml train.py`), with FSDP2 for ZeRO.

FSDP2 has no ZeRO-1: stages 1 and 2 both keep weights gathered from forward to backward (`reshard_after_forward` off).
Offload moves weights and optimizer together. Layers to wrap are the model's own list.
"""

from typing import Any

from tightfit.errors import UserError
from tightfit.exports.deepspeed import data_only
from tightfit.exports.host_states import host_states
from tightfit.plan.plan import Plan

MIXED = {"bf16": "bf16", "fp16": "fp16", "pure-bf16": "no", "fp32": "no"}


def accelerate_config(plan: Plan) -> dict[str, Any]:
    """The configuration as plain data, to be written as YAML."""
    data_only(plan, "an accelerate file")
    machine = plan.machine
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _kind(plan),
        "mixed_precision": MIXED[plan.workload.precision],
        "num_machines": machine.nodes,
        "num_processes": machine.ranks,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if config["distributed_type"] == "FSDP":
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": plan.layout.zero == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": plan.levers.checkpoint_every > 0,
            "fsdp_offload_params": host_states(plan.levers).optimizer,
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    return config


def _kind(plan: Plan) -> str:
    on_host = host_states(plan.levers)
    if plan.layout.zero or on_host.weights:
        return "FSDP"
    if on_host.optimizer:
        raise UserError(
            "FSDP2 offloads weights and optimizer together, but the plan has levers.offload=optimizer without ZeRO; "
            "plan with -o levers.offload=weights"
        )
    return "MULTI_GPU" if plan.machine.ranks > 1 else "NO"
