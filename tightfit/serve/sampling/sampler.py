"""From logits to tokens, for rows with settings of their own.

A token is drawn by inverting the distribution at one uniform number per row: the first token at which the cumulated
probability exceeds it. Probabilities are counted in whole numbers for that, whose sums are exact in any order; those of
floats are too coarse for a long tail, and a GPU's may rise at a token without a probability.
The same code gives the distributions that speculative decoding compares. On a GPU nothing is read back.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.kernels.decoding.top_k_top_p import cumulated, top_k_top_p
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.schedule.device import to_device
from tightfit.serve.schedule.sequence import Sequence

WHOLE = 2.0**52
"""What a probability of one counts; less than one of it is never drawn."""
BLOCK = 1024
"""Tokens that are counted together first."""
MOST_COUNTED = {"cuda": 2**23, "cpu": 2**18}
"""Probabilities that are counted at a time, in 8 bytes each: few launches, or what fits into a CPU's cache."""
LEAST_SHARE = 1e-6
"""Smaller shares of top-p and typical-p are this one, so that none is zero in float32 and keeps no token at all."""


@dataclass(frozen=True)
class Rows:
    """The settings by which rows are cut, as tensors [R, 1]; None for one that no row uses."""

    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    typical_p: Tensor | None

    @classmethod
    def of(cls, settings: Items[Sampling], device: torch.device, vocab_size: int) -> "Rows":
        """The `settings` of rows, in the rows' order."""

        def column(values: list[float], off: float) -> Tensor | None:
            return None if all(value == off for value in values) else to_device(values, device)[:, None]

        top_k = [min(each.top_k, vocab_size) or vocab_size for each in settings]
        return cls(
            top_k=column([float(k) for k in top_k], float(vocab_size)),
            top_p=column([max(each.top_p, LEAST_SHARE) for each in settings], 1.0),
            min_p=column([each.min_p for each in settings], 0.0),
            typical_p=column([max(each.typical_p, LEAST_SHARE) for each in settings], 1.0),
        )


def probabilities(logits: Tensor, settings: Items[Sampling]) -> Tensor:
    """The distribution [R, V] that each row is drawn from; all of it on the likeliest token for greedy rows."""
    temperature = to_device([1.0 if each.is_greedy else each.temperature for each in settings], logits.device)
    chances = (logits.float() / temperature[:, None]).softmax(-1)
    cut = [index for index, each in enumerate(settings) if _cuts(each)]
    if cut:
        some = slice(None) if len(cut) == len(settings) else to_device(cut, logits.device)
        rows = Rows.of([settings[index] for index in cut], logits.device, logits.shape[-1])
        chances[some] = filtered(chances[some], rows)
    greedy = [index for index, each in enumerate(settings) if each.is_greedy]
    if greedy:
        rows_of_greedy = to_device(greedy, logits.device)
        best = logits[rows_of_greedy].argmax(-1, keepdim=True)
        chances[rows_of_greedy] = chances.new_zeros(len(greedy), logits.shape[-1]).scatter_(-1, best, 1.0)
    return chances


def _cuts(sampling: Sampling) -> bool:
    cuts = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0 or sampling.typical_p < 1
    return cuts and not sampling.is_greedy


def filtered(chances: Tensor, rows: Rows) -> Tensor:
    """Probabilities after top-k, top-p, min-p and typical-p, each cutting what the one before left; rows sum to one."""
    if rows.top_k is not None or rows.top_p is not None:
        chances = top_k_top_p(chances, rows.top_k, rows.top_p)
    if rows.min_p is not None:
        chances = _normed(chances.masked_fill(chances < rows.min_p * chances.amax(-1, keepdim=True), 0.0))
    if rows.typical_p is not None:
        chances = _typical(chances, rows.typical_p)
    return chances


def draw(chances: Tensor, uniforms: Tensor) -> Tensor:
    """The token [R] at which the cumulated chances [R, V] exceed a share `uniforms` [R] of their sum. One without a
    chance is never drawn; rows sum to about one."""
    rows = max(1, MOST_COUNTED[chances.device.type] // chances.shape[-1])
    return torch.cat([_drawn(some, own) for some, own in zip(chances.split(rows), uniforms.split(rows), strict=True)])


def _drawn(chances: Tensor, uniforms: Tensor) -> Tensor:
    padded = F.pad(chances.float(), (0, -chances.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    counts = (padded * WHOLE).to(torch.int64)
    in_blocks = counts.sum(-1)
    ends = in_blocks.cumsum(-1)
    place = torch.minimum((uniforms.double()[:, None] * ends[:, -1:]).to(torch.int64), ends[:, -1:] - 1)
    block = torch.searchsorted(ends, place, right=True).clamp_(max=ends.shape[-1] - 1)
    within = counts.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0].cumsum(-1)
    place = place - (ends - in_blocks).gather(1, block)
    token = block * BLOCK + torch.searchsorted(within, place, right=True)
    return token[:, 0].clamp_(0, chances.shape[-1] - 1)


def _typical(chances: Tensor, share: Tensor) -> Tensor:
    """The fewest tokens closest to the entropy in surprise that together reach `share` (Meister et al. 2022)."""
    surprise = -chances.log()
    entropy = torch.where(chances > 0, chances * surprise, 0.0).sum(-1, keepdim=True)
    order = (surprise - entropy).abs().argsort(-1)
    ordered = chances.gather(-1, order)
    before = cumulated(ordered) - ordered
    ordered = ordered.masked_fill((before >= share) & (share < 1), 0.0)
    return _normed(torch.zeros_like(chances).scatter_(-1, order, ordered))


def _normed(chances: Tensor) -> Tensor:
    return chances / chances.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Cells:
    """Places in logits, and a number for each."""

    rows: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)

    def add(self, row: int, tokens: Iterable[int], numbers: Iterable[float]) -> None:
        """More of them, in one row."""
        self.tokens.extend(tokens)
        self.numbers.extend(numbers)
        self.rows.extend([row] * (len(self.tokens) - len(self.rows)))

    def of(self, logits: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """The index of these places in `logits`, and the numbers."""
        rows, tokens = to_device([self.rows, self.tokens], logits.device)
        return (rows, tokens), to_device(self.numbers, logits.device, logits.dtype)


def adjust(logits: Tensor, asked: Items[tuple[int, Sequence, Tensor | None]]) -> None:
    """Apply the penalties, the bias and the grammar of sequences to their rows of logits [R, V], in place; all
    sequences at once, as a GPU takes longer to be asked than to do it."""
    repeated, counted, biased = Cells(), Cells(), Cells()
    for row, sequence, _ in asked:
        sampling = sequence.sampling
        if sampling.repetition_penalty != 1:
            repeated.add(row, sequence.seen, repeat(sampling.repetition_penalty, len(sequence.seen)))
        if sampling.presence_penalty or sampling.frequency_penalty:
            counts, frequency = sequence.answer_counts, sampling.frequency_penalty
            counted.add(row, counts, (sampling.presence_penalty + frequency * count for count in counts.values()))
        biased.add(row, sampling.logit_bias, sampling.logit_bias.values())
    if repeated.rows:
        where, penalty = repeated.of(logits)
        seen = logits[where]
        logits[where] = torch.where(seen > 0, seen / penalty, seen * penalty)
    for cells, sign in ((counted, -1), (biased, 1)):
        if cells.rows:
            where, numbers = cells.of(logits)
            logits[where] += sign * numbers
    if forms := [(row, allowed) for row, _, allowed in asked if allowed is not None]:
        rows = to_device([row for row, _ in forms], logits.device)
        forbidden = ~torch.stack([allowed for _, allowed in forms]).to(logits.device)
        logits[rows] = logits[rows].masked_fill(forbidden, -torch.inf)
