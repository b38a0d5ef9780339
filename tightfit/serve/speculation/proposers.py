"""Speculative decoding: proposers guess a few tokens, which one step then checks (sampling/acceptance.py).

Guesses come from a smaller model (draft.py), or from the prompt itself: the longest recent run of tokens that occurred
before goes on as it did then. Sequences with penalties, a grammar or a bias are not guessed at: what is likely there
depends on the guesses before.
"""

from collections.abc import Sequence as Items
from typing import Protocol

from torch import Tensor

from tightfit.serve.schedule.scheduler import Chunk
from tightfit.serve.schedule.sequence import Sequence

LONGEST_MATCH = 4
SHORTEST_MATCH = 2


class Proposer(Protocol):
    """Guesses how sequences go on."""

    def propose(self, chunks: Items[Chunk]) -> dict[Sequence, Tensor]:
        """Fill the proposals of `chunks` that have room for one; returns what they were drawn from, [k, V] each, except
        for guesses made with certainty."""


def may_guess(sequence: Sequence) -> bool:
    """Whether guesses at how `sequence` goes on can be checked all at once."""
    sampling = sequence.sampling
    return not (sampling.has_penalties or sampling.grammar or sampling.logit_bias)


class PromptLookup:
    """Guesses that what followed the last few tokens before follows them again (Saxena 2023)."""

    def propose(self, chunks: Items[Chunk]) -> dict[Sequence, Tensor]:
        for chunk in chunks:
            if chunk.lookahead and may_guess(chunk.sequence):
                chunk.proposal = looked_up(chunk.sequence.tokens, chunk.lookahead)
        return {}


def looked_up(tokens: list[int], count: int) -> list[int]:
    """Up to `count` tokens after the latest earlier occurrence of the longest run that `tokens` end with."""
    for size in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
        end = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start] == end[0] and tokens[start : start + size] == end:
                return tokens[start + size : start + size + count]
    return []
