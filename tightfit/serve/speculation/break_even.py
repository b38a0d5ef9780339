"""Whether guessing pays: from which share of kept guesses on a step with guesses is faster than steps without.

A step that checks k guesses adds 1 + k · share tokens to an answer, so it pays where

    seconds(guess and check) / seconds(plain step) < 1 + k · share

Both are timed when an engine starts, for one answer under way; several at a time have to keep more, as checking then
costs more.
"""

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from tightfit.hardware.timing import seconds_each
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.sampling.chooser import SequenceRows, choose
from tightfit.serve.schedule.block_pool import BlockPool
from tightfit.serve.schedule.scheduler import Chunk
from tightfit.serve.schedule.sequence import Sequence
from tightfit.serve.speculation.proposers import Proposer

Logits = Callable[[list[Chunk]], Tensor]
POSITIONS = 32
"""Positions of the sequence that is timed."""
ROUNDS = 3
ENOUGH = 200
"""Guesses from which on their kept share is judged."""


def break_even_share(
    logits: Logits, proposer: Proposer, pool: BlockPool, guesses: int, *, longest: int
) -> float | None:
    """The share of kept guesses from which on guessing is faster; above 1: never. None without blocks to try it.
    `logits` runs a step of an engine whose sequences are at most `longest`."""
    length = min(POSITIONS, min(longest, pool.size * pool.block_size) - guesses)
    if length < 1:
        return None
    sequence = Sequence([0] * length, Sampling(temperature=0))
    sequence.slot = 0
    sequence.blocks = pool.take(pool.blocks_for(length + guesses))
    try:
        plain = _median_seconds(lambda: _step(logits, None, sequence, 0))
        guessing = _median_seconds(lambda: _step(logits, proposer, sequence, guesses))
    finally:
        pool.release(sequence.blocks)
    return (guessing / plain - 1) / guesses


@torch.inference_mode()
def _step(logits: Logits, proposer: Proposer | None, sequence: Sequence, guesses: int) -> None:
    """One step of an answer, as an engine runs it, with `guesses` guessed tokens."""
    last = sequence.length - 1
    sequence.draft_stored = last
    chunk = Chunk(sequence, last, 1, guesses, chooses=True)
    drawn = proposer.propose([chunk]) if proposer is not None else {}
    chunk.proposal = (chunk.proposal + [0] * guesses)[:guesses]  # a lookup may have found fewer
    choose(logits([chunk]), [SequenceRows(sequence, None, tuple(chunk.proposal), drawn.get(sequence))])


def _median_seconds(run: Callable[[], None]) -> float:
    return statistics.median(seconds_each(run, ROUNDS))


def hint(kept: int, guessed: int, needed: float | None) -> str | None:
    """A sentence where guesses are kept too seldom to pay; None where they pay, or are too few to judge."""
    if needed is None or guessed < ENOUGH or kept >= needed * guessed:
        return None
    pays = f"they pay from {needed:.0%} on" if needed <= 1 else "checking them takes longer than they can save here"
    return f"{kept / guessed:.0%} of {guessed:,} guesses were kept, but {pays}: answers would come sooner without"
