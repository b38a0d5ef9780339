"""Which guessed tokens are kept, so that answers have exactly the target's distribution.

With p the target's distribution and q the draft's at a position, guess x is kept with probability min(1, p(x) / q(x));
at the first that is not, a token is drawn from max(0, p − q), normalized; after the last, from p (Leviathan et al.
2023, Chen et al. 2023). A lookup guesses with certainty: q(x) = 1. Greedy is the case where p is on one token: guesses
are kept while they are the argmax.
"""

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from tightfit.serve.sampling.random_numbers import Purpose, uniform
from tightfit.serve.sampling.sampler import draw
from tightfit.serve.schedule.sequence import Sequence


def accepted(target: Tensor, proposal: Items[int], draft: Tensor | None, sequence: Sequence) -> list[int]:
    """The tokens that follow: the guesses that are kept, and one more; target is [k + 1, V], draft [k, V]."""
    kept: list[int] = []
    position = len(sequence.tokens)
    for index, guess in enumerate(proposal):
        p, q = target[index], None if draft is None else draft[index]
        share = float(p[guess]) / (1.0 if q is None else float(q[guess]))
        if uniform_of(sequence, position + index, "accept") < share:
            kept.append(guess)
            continue
        residual = p.clone()
        if q is None:
            residual[guess] = 0.0
        else:
            residual = (p - q).clamp_(min=0.0)
        return [*kept, draw_one(residual, uniform_of(sequence, position + index, "resample"))]
    return [*kept, draw_one(target[len(proposal)], uniform_of(sequence, position + len(proposal), "choose"))]


def uniform_of(sequence: Sequence, position: int, purpose: Purpose) -> float:
    """The random number in [0, 1) of one position of a sequence, for one purpose."""
    return uniform(sequence.sampling.seed, sequence.index, position, purpose)


def draw_one(chances: Tensor, number: float) -> int:
    """The token that a uniform `number` draws from chances [V]."""
    return int(draw(chances[None], torch.tensor([number], device=chances.device))[0])
