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
            parts.append(f"{axis} {degree}{_ring(layout) if axis == 'context' else _mesh(layout)}")
    experts = f", experts over {layout.expert}" if layout.expert > 1 else ""
    return f"{' × '.join(parts) or 'one GPU'}{experts}, micro-batch {layout.micro_batch}"


def describe_mesh(layout: Layout) -> str:
    """`in a line` or `on a 3d mesh (2 × 2 × 2)`."""
    if layout.tensor_mesh == "1d":
        return "in a line"
    axes = layout.tensor_axes[1:] if layout.tensor_mesh == "2d" else layout.tensor_axes
    return f"on a {layout.tensor_mesh} mesh ({' × '.join(map(str, axes))})"


def _mesh(layout: Layout) -> str:
    """How tensor ranks stand, where it is not in a line."""
    return "" if layout.tensor_mesh == "1d" else f" {describe_mesh(layout)}"


def _ring(layout: Layout) -> str:
    """How context ranks meet: ` (heads)`, ` (ring)` or, both, ` (ring of 2)`."""
    if layout.ring == 1:
        return " (heads)"
    return " (ring)" if layout.ring == layout.context else f" (ring of {layout.ring})"


def _checkpointing(levers: Levers) -> str:
    """`checkpoint one layer in 2, keeping attention, inputs on the host`."""
    if levers.checkpoint_budget_bytes is not None:
        said = f"recompute what {_gib(levers.checkpoint_budget_bytes)} of activations do not hold"
    elif levers.num_checkpoints:
        said = f"checkpoint {levers.num_checkpoints} layers"
    elif levers.checkpoint_every:
        said = (
            f"checkpoint {'every layer' if levers.checkpoint_every == 1 else f'one layer in {levers.checkpoint_every}'}"
        )
    else:
        return ""
    kept = {"nothing": "", "attention": ", keeping attention", "matmuls": ", keeping matmuls"}[levers.checkpoint_keep]
    lossy = " in fp8 (lossy)" if levers.checkpoint_format == "fp8" else ""
    return f"{said}{kept}{f', kept on the host{lossy}' if levers.offload_checkpoints else ''}"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def describe_levers(levers: Levers) -> str:
    """`checkpoint every layer, optimizer on the host`."""
    said = [_checkpointing(levers)] if _checkpointing(levers) else []
    if levers.offload != "none":
        here = f" but for {_gib(levers.offload_keep_bytes)}" if levers.offload_keep_bytes else ""
        which = "optimizer" if levers.offload == "optimizer" else "weights and optimizer"
        said.append(f"{which} on the host{here}")
    if levers.matmul != "native":
        said.append(f"{levers.matmul} matmuls (lossy)")
    if levers.tiles > 1:
        said.append(f"layers in {levers.tiles} tiles")
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
