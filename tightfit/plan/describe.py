"""Layouts and levers in words: only what differs from doing nothing."""

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers

STATES = {
    "fp32": "float32 optimizer states",
    "bf16": "bf16 optimizer states (lossy)",
    "8bit": "8-bit optimizer states (lossy)",
    "factored": "factored second moment (lossy)",
}


def describe_layout(layout: Layout) -> str:
    """`pipeline 4 (1f1b) × data 8 (ZeRO-1) × tensor 8, micro-batch 2`."""
    parts = []
    if layout.pipeline > 1:
        pieces = f" × {layout.stages_per_rank}" if layout.stages_per_rank > 1 else ""
        parts.append(f"pipeline {layout.pipeline} ({layout.schedule}{pieces})")
    zero = f"ZeRO-{layout.zero}" if layout.zero else "DDP"
    if layout.data > 1 or layout.zero:
        parts.append(f"data {layout.data} ({zero})")
    for axis in ("context", "tensor"):
        if (degree := getattr(layout, axis)) > 1:
            parts.append(f"{axis} {degree}")
    experts = f", experts over {layout.expert}" if layout.expert > 1 else ""
    return f"{' × '.join(parts) or 'one GPU'}{experts}, micro-batch {layout.micro_batch}"


def describe_levers(levers: Levers) -> str:
    """`checkpoint every layer, optimizer on the host`."""
    said = []
    if levers.checkpoint_every:
        every = levers.checkpoint_every
        which = "every layer" if every == 1 else f"one layer in {every}"
        where = ", kept on the host" if levers.offload_checkpoints else ""
        said.append(f"checkpoint {which}{where}")
    if levers.offload != "none":
        said.append("optimizer on the host" if levers.offload == "optimizer" else "weights and optimizer on the host")
    if levers.tiles > 1:
        said.append(f"MLP in {levers.tiles} tiles")
    if levers.loss == "plain":
        said.append("plain loss")
    elif levers.loss_chunk_bytes != Levers().loss_chunk_bytes:
        said.append(f"loss chunks of {levers.loss_chunk_bytes >> 20} MiB")
    if levers.optimizer_states in STATES:
        said.append(STATES[levers.optimizer_states])
    if levers.rounding == "stochastic":
        said.append("weights rounded stochastically")
    if levers.update_in_backward:
        said.append("updates in backward (clipped by the norm of the step before)")
    return ", ".join(said) or "none needed"
