"""Which guessed tokens are kept, so that answers have exactly the target's distribution.

With p the target's distribution and q the draft's at a position, guess x is kept with probability min(1, p(x) / q(x));
at the first that is not, a token is drawn from max(0, p − q), normalized; after the last, from p (Leviathan et al.
2023, Chen et al. 2023). A lookup guesses with certainty: q(x) = 1. Greedy is the case where p is on one token: guesses
are kept while they are the argmax.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from itertools import accumulate

import torch
from torch import Tensor

from tightfit.serve.sampling.random_numbers import Purpose, uniform
from tightfit.serve.sampling.sampler import draw
from tightfit.serve.schedule.device import to_device
from tightfit.serve.schedule.sequence import Sequence

Guesses = tuple[Sequence, Items[int], Tensor | None]
"""Guesses at how a sequence goes on, none or more, and the distributions [guesses, V] that they were drawn from; None
where they are certain."""


def agreeing(likeliest: Items[int], guesses: Items[int]) -> list[int]:
    """The tokens that follow greedily, given the `likeliest` after the last known token and after each guess."""
    kept = _leading([guess == token for guess, token in zip(guesses, likeliest, strict=False)])
    return list(likeliest[: kept + 1])


def accepted(target: Tensor, asked: Items[Guesses]) -> list[list[int]]:
    """The tokens that follow each sequence: its guesses that are kept, and one more. `target` [Σ (1 + guesses), V] has
    the distributions after the last known token of each and after each of its guesses."""
    starts = [0, *accumulate(1 + len(guesses) for _, guesses, _ in asked)][:-1]
    kept = _kept(target, starts, asked)
    last = target[to_device([start + count for start, count in zip(starts, kept, strict=True)], target.device)]
    numbers = []
    certain: list[tuple[int, int]] = []  # rows of `last`, and their guesses that were not kept
    drawn: list[tuple[int, Tensor]] = []  # the same with what they were drawn from
    for row, (count, (sequence, guesses, draft)) in enumerate(zip(kept, asked, strict=True)):
        rejects = count < len(guesses)
        numbers.append(uniform_of(sequence, sequence.length + count, "resample" if rejects else "choose"))
        if rejects and draft is None:
            certain.append((row, guesses[count]))
        elif rejects and draft is not None:
            drawn.append((row, draft[count]))
    if certain:
        rows, tokens = to_device(list(zip(*certain, strict=True)), target.device)
        last[rows] = _rest(last[rows], last[rows].scatter_(1, tokens[:, None], 0.0))
    if drawn:
        rows = to_device([row for row, _ in drawn], target.device)
        last[rows] = _rest(last[rows], last[rows] - torch.stack([chances for _, chances in drawn]))
    tokens = draw(last, to_device(numbers, target.device, torch.float64)).tolist()
    return [[*guesses[:count], token] for count, (_, guesses, _), token in zip(kept, asked, tokens, strict=True)]


def _rest(chances: Tensor, left: Tensor) -> Tensor:
    """What is `left` of `chances`, normalized; all of them where rounding leaves nothing."""
    left = left.clamp(min=0.0)
    whole = left.sum(-1, keepdim=True)
    return torch.where(whole > 0, left / whole, chances)


def _kept(target: Tensor, starts: Iterable[int], asked: Items[Guesses]) -> list[int]:
    """How many guesses of each sequence are kept."""
    rows = [start + i for start, (_, guesses, _) in zip(starts, asked, strict=True) for i in range(len(guesses))]
    if not rows:
        return [0] * len(asked)
    tokens = [token for _, guesses, _ in asked for token in guesses]
    numbers = [uniform_of(each, each.length + i, "accept") for each, guesses, _ in asked for i in range(len(guesses))]
    where, guessed = to_device([rows, tokens], target.device)
    share = target[where, guessed].double()
    drawn = [i for i, draft in enumerate(draft for _, guesses, draft in asked for _ in guesses) if draft is not None]
    if drawn:
        of_drawn, chances = to_device(drawn, target.device), [draft for _, _, draft in asked if draft is not None]
        share[of_drawn] /= torch.cat(chances).gather(1, guessed[of_drawn, None])[:, 0].double()
    keeps = iter((to_device(numbers, target.device, torch.float64) < share).tolist())
    return [_leading([next(keeps) for _ in guesses]) for _, guesses, _ in asked]


def _leading(keeps: list[bool]) -> int:
    """How many are true before the first that is not."""
    return keeps.index(False) if False in keeps else len(keeps)


def uniform_of(sequence: Sequence, position: int, purpose: Purpose) -> float:
    """The random number in [0, 1) of one position of a sequence, for one purpose."""
    return uniform(sequence.sampling.seed, sequence.index, position, purpose)
