"""Budget: the level at which each layer keeps activations within a number of bytes, for the least recomputation time.

A layer keeps one of four levels (recompute.py), each with its bytes and seconds of recomputation. Layers of a kind
(routed or not, windowed or not) have equal costs, so a choice is a number of layers per kind and level: a
multiple-choice knapsack, small enough to be solved exactly. With several kinds, the Pareto-optimal choices (bytes,
seconds) of each are listed and combined kind by kind, dominated sums being dropped; the fastest sum in the budget wins.

Layers that keep less come first. Backward begins with the last layers: the activations they keep are freed while few
gradients of weights exist yet, and the workspace of recomputation is needed only when most kept activations are freed.
(The layers before any given one then keep the least.)
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from tightfit.errors import UserError
from tightfit.levers.policy.recompute import KEEP_LEVELS, KeepLevel


class KeepOption(NamedTuple):
    """The cost of one level for a layer: bytes kept on the GPU, and seconds of recomputing the rest."""

    bytes: int
    seconds: float


Options = Sequence[KeepOption]
"""One option for each level."""


class KeepChoice(NamedTuple):
    """The number of layers of each kind at each level (`counts`), and their total bytes and seconds."""

    bytes: int
    seconds: float
    counts: tuple[tuple[int, ...], ...]


def cheapest_levels(
    kinds: Sequence[Hashable], options: Mapping[Hashable, Options], *, budget_bytes: int, always_bytes: int = 0
) -> tuple[KeepLevel, ...]:
    """The level of each layer, given the kind of each and the options of each kind.

    Together with `always_bytes`, which are kept in any case, the layers keep at most `budget_bytes`.
    """
    counts = [kinds.count(kind) for kind in options]
    best = cheapest(list(options.values()), counts, budget_bytes - always_bytes)
    if best is None:
        least = always_bytes + sum(options[kind][0].bytes for kind in kinds)
        raise UserError(
            f"levers.checkpoint_budget_bytes is {budget_bytes}, but the inputs of {len(kinds)} layers alone take "
            f"{least}; give at least that much, or set levers.offload_checkpoints"
        )
    ascending = {
        kind: iter([level for level, count in zip(KEEP_LEVELS, dealt, strict=True) for _ in range(count)])
        for kind, dealt in zip(options, best.counts, strict=True)
    }
    return tuple(next(ascending[kind]) for kind in kinds)


def cheapest(options: Sequence[Options], counts: Sequence[int], budget_bytes: int) -> KeepChoice | None:
    """The fastest choice for `counts[k]` layers with `options[k]` each; None where none fits in `budget_bytes`."""
    if len(options) == 1:
        return _quickest_of_one_kind(options[0], counts[0], budget_bytes)
    sums = [KeepChoice(0, 0.0, ())]
    for each, count in zip(options, counts, strict=True):
        choices = (_choice(each, dealt) for dealt in _deals(count, len(each)))
        of_kind = _unbeaten(choice for choice in choices if choice.bytes <= budget_bytes)
        sums = _unbeaten(_sum(a, b) for a in sums for b in of_kind if a.bytes + b.bytes <= budget_bytes)
    return min(sums, key=lambda choice: choice.seconds, default=None)


def _quickest_of_one_kind(options: Options, count: int, budget_bytes: int) -> KeepChoice | None:
    """For given counts of all options but the first two, the faster one of these two is taken as often as it fits; so
    only the counts of the other options, and the first two's sum, are enumerated."""
    slow, quick = (0, 1) if options[1].seconds <= options[0].seconds else (1, 0)
    more_bytes = options[quick].bytes - options[slow].bytes
    best: KeepChoice | None = None
    for left, *others in _deals(count, len(options) - 1):
        others_bytes = sum(n * option.bytes for n, option in zip(others, options[2:], strict=True))
        room = budget_bytes - others_bytes - left * options[slow].bytes
        taken = left if more_bytes <= 0 or room >= left * more_bytes else max(0, room // more_bytes)
        first_two = (left - taken, taken) if quick else (taken, left - taken)
        choice = _choice(options, (*first_two, *others))
        if choice.bytes <= budget_bytes and (best is None or choice.seconds < best.seconds):
            best = choice
    return best


def _choice(options: Options, dealt: tuple[int, ...]) -> KeepChoice:
    pairs = list(zip(dealt, options, strict=True))
    return KeepChoice(sum(n * o.bytes for n, o in pairs), sum(n * o.seconds for n, o in pairs), (dealt,))


def _sum(a: KeepChoice, b: KeepChoice) -> KeepChoice:
    return KeepChoice(a.bytes + b.bytes, a.seconds + b.seconds, a.counts + b.counts)


@lru_cache(maxsize=64)
def _deals(count: int, options: int) -> tuple[tuple[int, ...], ...]:
    """Every way to deal `count` layers to so many options."""
    if options == 1:
        return ((count,),)
    return tuple((n, *others) for n in range(count + 1) for others in _deals(count - n, options - 1))


def _unbeaten(choices: Iterator[KeepChoice]) -> list[KeepChoice]:
    """The Pareto front: choices for which no other has as few bytes and as few seconds."""
    found: list[KeepChoice] = []
    for choice in sorted(choices, key=lambda each: (each.bytes, each.seconds)):
        if not found or choice.seconds < found[-1].seconds:
            found.append(choice)
    return found
