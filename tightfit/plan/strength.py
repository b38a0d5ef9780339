"""Strength: which of two sets of levers can only need more memory, without counting it.

Sets that keep the same things on the host form a group. The strongest of a group stands for all of it: when that does
not fit, none of them does, be it the card or the host that is short.
"""

from collections.abc import Iterable
from functools import lru_cache

from tightfit.jobs.levers import Levers

OFFLOAD = {"none": 0, "optimizer": 1, "weights": 2}
STATES = {"fp32": -1, "auto": 0, "bf16": 1, "8bit": 2, "factored": 3}
Group = tuple[str, bool, str]


@lru_cache(maxsize=4096)
def strengths(levers: Levers) -> tuple[float, ...]:
    """One number per lever, larger for less memory."""
    return (
        OFFLOAD[levers.offload],
        STATES[levers.optimizer_states],
        1 / levers.checkpoint_every if levers.checkpoint_every else 0,
        levers.offload_checkpoints,
        levers.tiles,
        -levers.loss_chunk_bytes,
        levers.loss == "fused",
        levers.update_in_backward,
    )


def weaker(levers: Levers, other: Levers) -> bool:
    """Whether `levers` pulls no lever harder than `other` does."""
    return all(mine <= theirs for mine, theirs in zip(strengths(levers), strengths(other), strict=True))


def group_of(levers: Levers) -> Group:
    """What these levers keep on the host, and in which format."""
    return levers.offload, levers.offload_checkpoints, levers.optimizer_states


def ceilings(levers: Iterable[Levers]) -> dict[Group, Levers]:
    """The strongest set of each group; `levers` come in ascending strength within a group."""
    return {group_of(each): each for each in levers}
