"""Budget: which layers keep how much in so many bytes, so that the least time goes into computing again.

A layer keeps one of four levels (recompute.py), each with bytes and seconds of recomputation. Layers of a kind (routed
or not, windowed or not) are alike, so a choice is a number of layers per kind and level: a multiple-choice knapsack,
small enough to be solved exactly. Where there are several kinds, all choices of each are listed without those that
another beats in both bytes and seconds; kinds are added up likewise, and the quickest sum in the budget is taken.

Layers that keep less come first. Backward begins with the last layers: what they keep is freed while gradients of
weights are still few, and the memory in which a layer is computed again is needed only when most of what was kept is
gone. (What the layers before any one keep is then least.)
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from tightfit.errors import UserError
from tightfit.levers.policy.recompute import KEEP_LEVELS, KeepLevel


class KeepOption(NamedTuple):
    """What keeping at one level costs a layer: bytes on the GPU, and seconds of computing the rest again."""

    bytes: int
    seconds: float


Options = Sequence[KeepOption]
"""One for each level."""


class KeepChoice(NamedTuple):
    """How many layers of each kind keep at each level, and what that costs together."""

    bytes: int
    seconds: float
    counts: tuple[tuple[int, ...], ...]


def cheapest_levels(
    kinds: Sequence[Hashable], options: Mapping[Hashable, Options], *, budget_bytes: int, always_bytes: int = 0
) -> tuple[KeepLevel, ...]:
    """The level of each layer, given the kind of each and the options of each kind.

    Beside `always_bytes`, which are held whatever is chosen, they keep no more than `budget_bytes` together.
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
    """The quickest choice for `counts[k]` layers with `options[k]` each; None where none is within `budget_bytes`."""
    if len(options) == 1:
        return _quickest_of_one_kind(options[0], counts[0], budget_bytes)
    sums = [KeepChoice(0, 0.0, ())]
    for each, count in zip(options, counts, strict=True):
        choices = (_choice(each, dealt) for dealt in _deals(count, len(each)))
        of_kind = _unbeaten(choice for choice in choices if choice.bytes <= budget_bytes)
        sums = _unbeaten(_sum(a, b) for a in sums for b in of_kind if a.bytes + b.bytes <= budget_bytes)
    return min(sums, key=lambda choice: choice.seconds, default=None)


def _quickest_of_one_kind(options: Options, count: int, budget_bytes: int) -> KeepChoice | None:
    """Of the first two options, the quicker one is taken as often as it fits, whatever is taken of the others: so only
    deals of those others are gone through."""
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
    """Without those that another needs neither more bytes nor more seconds than."""
    found: list[KeepChoice] = []
    for choice in sorted(choices, key=lambda each: (each.bytes, each.seconds)):
        if not found or choice.seconds < found[-1].seconds:
            found.append(choice)
    return found
