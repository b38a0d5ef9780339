"""Which format Adam's moments have, and whose AdamW updates them: the one rule that trainer and formulas share.

`auto` is the format of what is updated: float32 masters or weights, or bf16 weights where there are no masters. Torch's
fused AdamW wants moments in that very format and gradients too, so narrow gradients are widened for it, a bucket at a
time. Everything else (another format, weights rounded stochastically, an update inside backward, states on the host)
is done by our own kernels, which read gradients as they are.
"""

from typing import TYPE_CHECKING, Literal

from tightfit.jobs.lever_table import own_updates

if TYPE_CHECKING:
    from tightfit.jobs.levers import Levers

Format = Literal["fp32", "bf16", "8bit", "factored"]
BLOCK_8BIT = 256
"""Numbers of an 8-bit moment that share a float32 scale; a test compares it with the kernel's."""
MOMENT_BYTES: dict[Format, float] = {"fp32": 8, "bf16": 4, "8bit": 2 + 2 * 4 / BLOCK_8BIT, "factored": 2}
"""Both moments of one weight. A factored second moment is a number per row and column: a few thousandths, left out."""


def state_format(levers: "Levers", *, wide: bool) -> Format:
    """The format of the moments; `wide` says that what AdamW updates is float32."""
    if levers.optimizer_states != "auto":
        return levers.optimizer_states
    return "fp32" if wide else "bf16"


def is_torch_adamw(levers: "Levers", *, wide: bool) -> bool:
    """Whether torch's own fused AdamW makes the update."""
    return state_format(levers, wide=wide) == ("fp32" if wide else "bf16") and not own_updates(levers)


def moment_bytes(levers: "Levers", *, wide: bool) -> float:
    """Bytes of both moments per weight."""
    return MOMENT_BYTES[state_format(levers, wide=wide)]
