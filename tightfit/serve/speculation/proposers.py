"""Speculative decoding: proposers guess a few tokens, which one step then checks (sampling/acceptance.py).

Guesses come from a smaller model, or from the prompt itself (the longest recent run of tokens that occurred before goes
on as it did then). Sequences with penalties, a grammar or a bias are not guessed at: what is likely there depends on
the guesses before.
"""

from collections.abc import Sequence as Items
from typing import Protocol

import torch
from torch import Tensor

from tightfit.serve.sampling.acceptance import draw_one, uniform_of
from tightfit.serve.sampling.sampler import probabilities
from tightfit.serve.schedule.scheduler import Chunk
from tightfit.serve.schedule.sequence import Sequence

LONGEST_MATCH = 4
SHORTEST_MATCH = 2


class Proposer(Protocol):
    """Guesses how sequences go on."""

    def propose(self, chunks: Items[Chunk]) -> dict[Sequence, Tensor]:
        """Fill the proposals of `chunks` that have room for one; returns what they were drawn from, [k, V] each."""


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


class DraftModel:
    """Guesses with a smaller model, whose own cache has the same blocks as the target's."""

    def __init__(self, runner: "DraftRunner") -> None:
        self.runner = runner

    def propose(self, chunks: Items[Chunk]) -> dict[Sequence, Tensor]:
        """Guess one token of every sequence at a time, up to the chunk's `lookahead`."""
        self._catch_up([chunk for chunk in chunks if not (chunk.lookahead and may_guess(chunk.sequence))])
        guessing = [chunk for chunk in chunks if chunk.lookahead and may_guess(chunk.sequence)]
        drawn: dict[Sequence, list[Tensor]] = {chunk.sequence: [] for chunk in guessing}
        step = [_behind(chunk) for chunk in guessing]
        for turn in range(max((chunk.lookahead for chunk in guessing), default=0)):
            wanted = [i for i, chunk in enumerate(guessing) if chunk.lookahead > turn]
            logits = self.runner.run([step[i] for i in wanted])
            chances = probabilities(logits, [guessing[i].sequence.sampling for i in wanted])
            for row, i in enumerate(wanted):
                own = guessing[i].sequence
                token = draw_one(chances[row], uniform_of(own, len(own.tokens) + turn, "draft"))
                guessing[i].proposal.append(token)
                drawn[own].append(chances[row])
                step[i] = Chunk(own, own.length + turn, 0, proposal=[token])
        for chunk in guessing:
            chunk.sequence.draft_stored = chunk.sequence.length + chunk.lookahead - 1
        return {sequence: torch.stack(rows) for sequence, rows in drawn.items()}

    def _catch_up(self, chunks: Items[Chunk]) -> None:
        """Store in the draft's cache the positions that the target will have stored."""
        behind = [chunk_behind for chunk in chunks if (chunk_behind := _behind(chunk)).count]
        if behind:
            self.runner.run(behind)
        for chunk in behind:
            chunk.sequence.draft_stored = chunk.end


class DraftRunner(Protocol):
    """Runs chunks through the draft model."""

    def run(self, chunks: Items[Chunk]) -> Tensor:
        """Logits after the last token of each, guesses included, [chunks, V]."""


def _behind(chunk: Chunk) -> Chunk:
    """A chunk of the positions up to the end of `chunk` that the draft's cache lacks."""
    own = chunk.sequence
    return Chunk(own, own.draft_stored, chunk.end - own.draft_stored)
