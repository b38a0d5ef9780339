"""A plan as a DeepSpeed configuration, for `engine: deepspeed`, `deepspeed.initialize` or the Hugging Face Trainer.

The optimizer is torch's fused AdamW, also for offloaded states: DeepSpeed's own optimizers are compiled on first use,
for a minute or more, and are no faster. Clipping is always written, because DeepSpeed's default is to clip at 1.

DeepSpeed splits over data ranks only; a plan with other degrees has no such file. It has no checkpointing switch of its
own for Hugging Face models and no fused loss (`tightfit.hf.accelerate`).

The Trainer refuses a configuration that contradicts its own arguments, whose defaults differ from ours.
`trainer_arguments` match the file: `TrainingArguments(output, deepspeed="deepspeed.json", **json.load(file))`.
"""

from typing import Any

from tightfit.errors import UserError
from tightfit.exports.host_states import HostStates, host_states
from tightfit.jobs.job import Optimizer
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.precision import PrecisionName
from tightfit.jobs.workload import Workload
from tightfit.plan.batch import batch_of
from tightfit.plan.plan import Plan

PRECISIONS: dict[PrecisionName, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}},
}


def data_only(plan: Plan, program: str) -> None:
    """Raise a UserError if `program` cannot run the plan's layout."""
    for axis, degree in plan.layout.splits.items():
        raise UserError(
            f"{program} splits over data ranks only, but the plan has layout.{axis}={degree}; "
            f"plan with -o layout.{axis}=1"
        )


def deepspeed_config(plan: Plan) -> dict[str, Any]:
    """The configuration as plain data."""
    data_only(plan, "a DeepSpeed file")
    optimizer = Optimizer.model_validate(plan.job.get("optimizer", {}))
    return settings(plan.workload, plan.layout, plan.levers, optimizer)


def settings(workload: Workload, layout: Layout, levers: Levers, optimizer: Optimizer) -> dict[str, Any]:
    """The configuration for a layout of data ranks alone."""
    if workload.precision == "pure-bf16":
        raise UserError("DeepSpeed keeps float32 master weights beside bf16; take precision bf16")
    batch = batch_of(workload, layout)
    adamw = optimizer.model_dump(mode="json", include={"lr", "betas", "eps", "weight_decay"})
    return {
        "train_batch_size": batch.rows,
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
        "gradient_clipping": optimizer.clip_norm,
        **PRECISIONS[workload.precision],
        "optimizer": {"type": "AdamW", "params": {**adamw, "torch_adam": True, "fused": True}},
        "zero_optimization": _zero(layout, host_states(levers)),
    }


def trainer_arguments(plan: Plan) -> dict[str, Any]:
    """The arguments of `transformers.TrainingArguments` that agree with `deepspeed_config`."""
    config = deepspeed_config(plan)
    adamw = config["optimizer"]["params"]
    steps = {"max_steps": plan.steps} if plan.steps else {}
    return {
        "per_device_train_batch_size": config["train_micro_batch_size_per_gpu"],
        "gradient_accumulation_steps": config["gradient_accumulation_steps"],
        "gradient_checkpointing": plan.levers.checkpoint_every > 0,
        "learning_rate": adamw["lr"],
        "adam_beta1": adamw["betas"][0],
        "adam_beta2": adamw["betas"][1],
        "adam_epsilon": adamw["eps"],
        "weight_decay": adamw["weight_decay"],
        "max_grad_norm": config["gradient_clipping"],
        "bf16": plan.workload.precision == "bf16",
        "fp16": plan.workload.precision == "fp16",
        **steps,
    }


def _zero(layout: Layout, on_host: HostStates) -> dict[str, Any]:
    stage = max(layout.zero, on_host.least_zero)
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    host = {"device": "cpu", "pin_memory": True}
    if on_host.optimizer:
        zero["offload_optimizer"] = host
    if on_host.weights:
        zero["offload_param"] = host
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    return zero
