"""The tokens that follow a step's rows of logits: one per row, or a guess checked over several rows."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from tightfit.serve.requests.grammar import Matcher
from tightfit.serve.requests.request import TokenLogprob
from tightfit.serve.sampling.acceptance import accepted, agreeing
from tightfit.serve.sampling.sampler import adjust, probabilities
from tightfit.serve.schedule.sequence import Sequence


@dataclass(frozen=True)
class SequenceRows:
    """What the rows of logits of one sequence are for: its state in a grammar, its guessed tokens, and the
    distributions that these were drawn from."""

    sequence: Sequence
    matcher: Matcher | None = None
    proposal: tuple[int, ...] = ()
    proposed_from: Tensor | None = None

    @property
    def rows(self) -> int:
        """How many rows of logits it has."""
        return 1 + len(self.proposal)


@dataclass(frozen=True)
class Chosen:
    """The next tokens of a sequence, and their log probabilities where they are asked for."""

    tokens: list[int]
    logprobs: list[TokenLogprob]


def choose_alone(logits: Tensor, asked: Items[SequenceRows]) -> list[Chosen]:
    """`choose` for each sequence by itself: sums over a row run in one order whatever the others ask for."""
    starts = _starts(asked)
    return [
        choose(logits[start : start + own.rows].clone(), [own])[0] for own, start in zip(asked, starts, strict=True)
    ]


@torch.inference_mode()
def choose(logits: Tensor, asked: Items[SequenceRows]) -> list[Chosen]:
    """The next tokens of each sequence, given the logits [rows of all, V], which are changed in place."""
    raw = [_raw_row(logits, each, start) for each, start in zip(asked, _starts(asked), strict=True)]
    adjust(
        logits,
        [
            (start, each.sequence, each.matcher.allowed() if each.matcher else None)
            for each, start in zip(asked, _starts(asked), strict=True)
            if each.sequence.sampling.needs_host
        ],
    )
    tokens = _tokens(logits, asked)
    return [Chosen(own, _logprobs(own, row, each)) for own, row, each in zip(tokens, raw, asked, strict=True)]


def _tokens(logits: Tensor, asked: Items[SequenceRows]) -> list[list[int]]:
    if all(each.sequence.sampling.is_greedy for each in asked):
        likeliest = iter(logits.argmax(-1).tolist())
        return [agreeing([next(likeliest) for _ in range(each.rows)], each.proposal) for each in asked]
    settings = [each.sequence.sampling for each in asked for _ in range(each.rows)]
    chances = probabilities(logits, settings)
    return accepted(chances, [(each.sequence, each.proposal, each.proposed_from) for each in asked])


def _starts(asked: Items[SequenceRows]) -> list[int]:
    starts, start = [], 0
    for each in asked:
        starts.append(start)
        start += each.rows
    return starts


def _raw_row(logits: Tensor, each: SequenceRows, start: int) -> Tensor | None:
    """Log probabilities of the model alone, [rows, V], before anything changes them."""
    if each.sequence.sampling.logprobs is None:
        return None
    return logits[start : start + each.rows].float().log_softmax(-1)


def _logprobs(tokens: list[int], raw: Tensor | None, each: SequenceRows) -> list[TokenLogprob]:
    wanted = each.sequence.sampling.logprobs
    if raw is None or wanted is None:
        return []
    logprobs = []
    for token, row in zip(tokens, raw, strict=False):
        best = row.topk(wanted) if wanted else None
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True) if best is not None else ()
        logprobs.append(TokenLogprob(token, row[token].item(), tuple(pairs)))
    return logprobs
