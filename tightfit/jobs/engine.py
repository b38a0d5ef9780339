"""Engine: who holds the weights and updates them. Ours (torch's DDP and FSDP2 underneath), or DeepSpeed.

DeepSpeed runs data ranks under ZeRO-1, 2 and 3 with AdamW in float32, on the host if asked; levers that change what
happens inside a layer or its loss are ours and work beside it. Everything else is refused here, in one sentence.
"""

from typing import Literal

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers

EngineName = Literal["tightfit", "deepspeed"]
OTHER_AXES = ("tensor", "pipeline", "context", "expert", "shard_inside")
LEVERS_BESIDE_DEEPSPEED = (
    "checkpoint_every", "num_checkpoints", "checkpoint_keep", "checkpoint_budget_bytes", "loss", "loss_chunk_bytes",
    "tiles", "offload",
)  # fmt: skip


def refused_by_deepspeed(layout: Layout, levers: Levers, precision: str) -> str | None:
    """What DeepSpeed cannot do of a job and what to do about it; None where it can do all of it."""
    for axis in OTHER_AXES:
        if (degree := getattr(layout, axis)) > int(axis != "shard_inside"):
            return f"layout.{axis} is {degree}, but DeepSpeed splits over data ranks only; set engine to tightfit"
    if not layout.zero and levers.offload == "none":
        return (
            "layout.zero is 0 and levers.offload is none, which leaves engine deepspeed nothing to do; set layout.zero "
            "to 1, 2 or 3, or engine to tightfit"
        )
    if precision == "pure-bf16":
        return "precision is pure-bf16, but engine deepspeed keeps float32 master weights; set precision to bf16"
    for name, value in levers:
        if name not in LEVERS_BESIDE_DEEPSPEED and value != Levers.model_fields[name].default:
            return (
                f"levers.{name} is {value}, which engine deepspeed does not do; leave it out or set engine to tightfit"
            )
    return None
