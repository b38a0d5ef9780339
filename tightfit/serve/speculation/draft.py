"""Guesses of a draft model, or of the model itself without some of its layers, which has its own cache over the same
blocks: block b wherever the target has block b.

All sequences are guessed at together, a token of each at a time; each turn reads on the device what the turn before
drew there, and the host reads all guesses at once.
"""

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.spec import ModelSpec
from tightfit.serve.budget import Budget
from tightfit.serve.config import EngineConfig
from tightfit.serve.forward.runner import Runner, make_cache
from tightfit.serve.graphs.steps import Steps
from tightfit.serve.sampling.acceptance import uniform_of
from tightfit.serve.sampling.sampler import draw, probabilities
from tightfit.serve.schedule.device import to_device
from tightfit.serve.schedule.scheduler import Chunk
from tightfit.serve.schedule.sequence import Sequence
from tightfit.serve.schedule.step import ordered
from tightfit.serve.speculation.proposers import may_guess


class DraftModel:
    """Guesses with a smaller model."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    @torch.inference_mode()
    def propose(self, chunks: Items[Chunk]) -> dict[Sequence, Tensor]:
        """Guess as many tokens of every sequence as its chunk has room for; greedy guesses are certain."""
        guessing = [chunk for chunk in chunks if chunk.lookahead and may_guess(chunk.sequence)]
        guessing.sort(key=lambda chunk: -chunk.lookahead)  # those that go on are always the first
        self._catch_up(chunks, guessing)
        guesses: list[Tensor] = []
        chances: list[Tensor] = []
        for turn in range(guessing[0].lookahead if guessing else 0):
            going = [chunk.sequence for chunk in guessing if chunk.lookahead > turn]
            step = [Chunk(own, own.draft_stored, own.length + turn - own.draft_stored, chooses=True) for own in going]
            if all(own.sampling.is_greedy for own in going):
                guesses.append(self._likeliest(step))
            else:
                chances.append(probabilities(self._logits(step), [own.sampling for own in going]))
                numbers = [uniform_of(own, own.length + turn, "draft") for own in going]
                guesses.append(draw(chances[-1], to_device(numbers, self.steps.device, torch.float64)))
                self.steps.remember(step, guesses[-1])
            for own in going:
                own.draft_stored = own.length + turn
        for tokens in [each.tolist() for each in guesses]:
            for chunk, token in zip(guessing, tokens, strict=False):
                chunk.proposal.append(token)
        return {
            chunk.sequence: torch.stack([turn[row] for turn in chances[: chunk.lookahead]])
            for row, chunk in enumerate(guessing)
            if not chunk.sequence.sampling.is_greedy
        }

    def _catch_up(self, chunks: Items[Chunk], guessing: Items[Chunk]) -> None:
        """Store positions that the target will have stored and the draft lacks. Of sequences `guessing`, the first turn
        stores them; but captured turns take one token each."""
        lacking = []
        for chunk in chunks:
            own, end = chunk.sequence, chunk.end
            if chunk in guessing:
                end = chunk.start if self.steps.graphs is not None else own.draft_stored
            if end > own.draft_stored:
                lacking.append(Chunk(own, own.draft_stored, end - own.draft_stored))
        self.steps.store(lacking)
        for chunk in lacking:
            chunk.sequence.draft_stored = chunk.end

    def _likeliest(self, step: list[Chunk]) -> Tensor:
        """The likeliest token after each chunk."""
        if self.steps.decodes(step):
            return self.steps.choose_greedily(step).clone()
        tokens = self._logits(step).argmax(-1)
        self.steps.remember(step, tokens)
        return tokens

    def _logits(self, step: list[Chunk]) -> Tensor:
        """Logits after each chunk, in the order given."""
        order = ordered(step)
        logits = self.steps.logits(order)
        return logits if order == step else logits[[order.index(chunk) for chunk in step]]


def refuse_other_tokens(draft: ModelSpec, target: ModelSpec) -> None:
    """Refuse a draft model with another vocabulary than its target's."""
    if draft.vocab_size != target.vocab_size:
        raise UserError(
            f"the draft model has {draft.vocab_size} tokens and the model {target.vocab_size}; "
            "give a draft with the same tokenizer"
        )


def make_draft_runner(draft: Decoder, target: Decoder, budget: Budget, config: EngineConfig) -> Runner:
    """The draft model of `target`; both must have the same vocabulary."""
    refuse_other_tokens(draft.spec, target.spec)
    if draft.spec.max_positions < budget.max_length:
        raise UserError(
            f"the draft model has {draft.spec.max_positions} positions and requests may have {budget.max_length}; "
            "give a smaller max length"
        )
    weight = draft.embed.weight
    cache = make_cache(draft.spec, budget.blocks, config.block_size, weight.device, weight.dtype)
    return Runner(draft.eval(), cache, budget.max_length, config.max_sequences)
