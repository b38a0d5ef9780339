"""Keeping: what each layer keeps of a forward pass for backward, from the levers of checkpointing.

Four levels, each with what the one before keeps:

    nothing      the layer's input; all of it is computed again, but for its last product
    attention    and attention's output with its float32 per row and head: the dearest result per byte at long lengths
    matmuls      and every matrix product that something else is computed from; norms, rope and the gate are left to do
    everything   what autograd keeps; nothing is computed again

The same function decides for formulas, simulations and runs. Layers that keep less come first. Backward begins with the
last layers: what they keep is freed while gradients of weights are still few, and the memory in which a layer is
computed again is needed only when most of what was kept is gone. (What the layers before any one keep is then least.)
"""

from functools import lru_cache
from typing import Literal

from tightfit.errors import UserError
from tightfit.jobs.levers import Levers
from tightfit.memory.formulas.budget import cheapest_levels
from tightfit.memory.formulas.layer import LEVELS, Level
from tightfit.memory.formulas.share import Share
from tightfit.models.spec import ModelSpec

SCALE_BYTES = 4
__all__ = ["LEVELS", "Level", "is_checkpointed", "layer_levels", "levels_of", "offloaded_count", "stored_bytes"]


def is_checkpointed(levers: Levers) -> bool:
    """Whether any layer may be computed again."""
    return bool(levers.checkpoint_every or levers.num_checkpoints or levers.checkpoint_budget_bytes is not None)


def layer_levels(
    spec: ModelSpec, levers: Levers, share: Share, first: int = 0, last: int | None = None
) -> tuple[Level, ...]:
    """What each of the layers [first, last) of a rank keeps of one micro-batch."""
    return levels_of(spec, levers, share, range(first, spec.layers if last is None else last))


def levels_of(spec: ModelSpec, levers: Levers, share: Share, layers: range | tuple[int, ...]) -> tuple[Level, ...]:
    """The same for any layers that a rank may have."""
    budget = levers.checkpoint_budget_bytes
    return _levels(
        spec, share, layers, levers.checkpoint_every, levers.num_checkpoints, levers.checkpoint_keep,
        -1 if budget is None else budget, levers.offload_checkpoints,
    )  # fmt: skip


@lru_cache(maxsize=65536)
def _levels(
    spec: ModelSpec, share: Share, layers: range | tuple[int, ...], every: int, count: int, keep: Level, budget: int,
    offload: bool,
) -> tuple[Level, ...]:  # fmt: skip
    """From single settings, remembered; a `budget` below zero is none."""
    if budget >= 0:
        return cheapest_levels(spec, share, layers, budget, offload)
    chosen = _recomputed(spec.layers, every, count)
    return tuple(keep if layer in chosen else "everything" for layer in layers)


def _recomputed(layers: int, every: int, count: int) -> set[int]:
    if count > layers:
        raise UserError(f"levers.num_checkpoints is {count}, but the model has {layers} layers; give at most that many")
    if count:
        return {place * layers // count for place in range(count)}
    return set(range(0, layers, every)) if every else set()


def offloaded_count(recomputed: int, each_bytes: int, host_bytes: int | None) -> int:
    """Of so many layers that are computed again, how many have their input on the host: the first ones.

    They wait longest. The last one's is needed as soon as backward begins, so it stays.
    """
    most = max(0, recomputed - 1)
    return most if host_bytes is None else min(most, host_bytes // max(1, each_bytes))


def stored_bytes(rows: int, width: int, element_bytes: int, form: Literal["exact", "fp8"]) -> int:
    """One layer's input [rows, width] on the host; fp8 has a byte each and a float32 per row."""
    return rows * (width + SCALE_BYTES) if form == "fp8" else rows * width * element_bytes
