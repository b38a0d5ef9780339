"""The format of Adam's moments, and whether torch's AdamW or our kernels update: one rule for trainer and formulas.

`auto` is the dtype of the updated tensors: float32 masters or weights, or bf16 weights without masters. Torch's fused
AdamW needs moments and gradients in that dtype, so 16-bit gradients are cast to float32 for it, a bucket at a time. All
other updates (another format, stochastic rounding, updates inside backward, states on the host) are made by our own
kernels, which read gradients in their own dtype.
"""

from typing import TYPE_CHECKING, Literal

from tightfit.jobs.lever_table import own_updates

if TYPE_CHECKING:
    from tightfit.jobs.levers import Levers

Format = Literal["fp32", "bf16", "8bit", "factored"]
BLOCK_8BIT = 256
"""Numbers of an 8-bit moment that share a float32 scale; a test compares it with the kernel's."""
MOMENT_BYTES: dict[Format, float] = {"fp32": 8, "bf16": 4, "8bit": 2 + 2 * 4 / BLOCK_8BIT, "factored": 2}
"""Bytes of both moments of a weight. A factored second moment, a number per row and column, is a few thousandths of
that and not counted."""


def state_format(levers: "Levers", *, wide: bool) -> Format:
    """The format of the moments; `wide`: AdamW updates float32 tensors."""
    if levers.optimizer_states != "auto":
        return levers.optimizer_states
    return "fp32" if wide else "bf16"


def is_torch_adamw(levers: "Levers", *, wide: bool) -> bool:
    """Whether torch's own fused AdamW makes the update."""
    return state_format(levers, wide=wide) == ("fp32" if wide else "bf16") and not own_updates(levers)


def moment_bytes(levers: "Levers", *, wide: bool) -> float:
    """Bytes of both moments per weight."""
    return MOMENT_BYTES[state_format(levers, wide=wide)]
