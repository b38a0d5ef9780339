"""Lever choices: what a search tries of each lever, and which of two sets of levers needs more memory.

One table. Values stand weakest first: a later one never needs more memory. Left out because something else is never
worse: the plain loss (slower and larger); a pin brings it back. Of the levers that some layouts refuse (jobs/rules),
only those that run everywhere are searched.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from tightfit.jobs.levers import Levers

TILED_LENGTH = 16384
"""From this length on tiles save more of activations than their float32 sums of weights' gradients take."""
OFFLOADED = {"none": 0, "optimizer": 1, "weights": 2}
NARROWED = {"fp32": -1, "auto": 0, "bf16": 1, "8bit": 2, "factored": 3}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a search may touch."""

    host: bool = True
    """Host memory, for states and checkpoints."""
    lossy: bool = False
    long_rows: bool = False
    whole_batch: bool = False
    """One rank may take a step's batch in one backward pass, and update weights in it."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One lever: what is tried of it, and a number that grows as memory shrinks."""

    lever: str
    values: Callable[[Wanted], tuple[Any, ...]]
    strength: Callable[[Any], float]


CHOICES = (
    Choice(
        lever="offload",
        values=lambda wanted: ("none", "optimizer", "weights") if wanted.host else ("none",),
        strength=OFFLOADED.__getitem__,
    ),
    Choice(
        lever="optimizer_states",
        values=lambda wanted: ("auto", "bf16", "8bit") if wanted.lossy else ("auto",),
        strength=NARROWED.__getitem__,
    ),
    Choice(
        lever="checkpoint_every", values=lambda wanted: (0, 4, 2, 1), strength=lambda every: 1 / every if every else 0
    ),
    Choice(
        lever="offload_checkpoints", values=lambda wanted: (False, True) if wanted.host else (False,), strength=float
    ),
    Choice(lever="tiles", values=lambda wanted: (1, 8) if wanted.long_rows else (1,), strength=float),
    Choice(
        lever="loss_chunk_bytes",
        values=lambda wanted: (Levers().loss_chunk_bytes, 0),
        strength=lambda chunk_bytes: -chunk_bytes,
    ),
    Choice(lever="loss", values=lambda wanted: ("fused",), strength=lambda loss: loss == "fused"),
    Choice(
        lever="update_in_backward",
        values=lambda wanted: (False, True) if wanted.whole_batch else (False,),
        strength=float,
    ),
)
Group = tuple[str, bool, str]


def lever_sets(wanted: Wanted, pinned: Mapping[str, Any]) -> list[Levers]:
    """Every set of levers, the simplest first and the strongest last."""
    values = {choice.lever: choice.values(wanted) for choice in CHOICES}
    values |= {name: (value,) for name, value in pinned.items()}
    sets = (dict(zip(values, each, strict=True)) for each in product(*values.values()))
    return [Levers(**each) for each in sets if _is_worth_trying(each, pinned)]


def _is_worth_trying(chosen: Mapping[str, Any], pinned: Mapping[str, Any]) -> bool:
    """Offloaded checkpoints of every layer unless pinned; offloaded weights only where every layer is recomputed,
    as autograd must not remember them."""
    every = chosen["checkpoint_every"]
    if chosen["offload"] == "weights" and every != 1:
        return False
    if not chosen["offload_checkpoints"]:
        return True
    recomputes = every or chosen.get("num_checkpoints") or chosen.get("checkpoint_budget_bytes") is not None
    return bool(recomputes) and (every <= 1 or "offload_checkpoints" in pinned)


@lru_cache(maxsize=4096)
def strengths(levers: Levers) -> tuple[float, ...]:
    """One number per lever, larger for less memory."""
    return tuple(choice.strength(getattr(levers, choice.lever)) for choice in CHOICES)


def weaker(levers: Levers, other: Levers) -> bool:
    """Whether `levers` pulls no lever harder than `other` does, and so needs no less memory."""
    return all(mine <= theirs for mine, theirs in zip(strengths(levers), strengths(other), strict=True))


def host_group(levers: Levers) -> Group:
    """What these levers keep on the host, and in which format."""
    return levers.offload, levers.offload_checkpoints, levers.optimizer_states


def strongest_of_groups(sets: Iterable[Levers]) -> dict[Group, Levers]:
    """The strongest set of each group, which come in ascending strength: when that does not fit, none of them does,
    be it the card or the host that is short."""
    return {host_group(each): each for each in sets}
