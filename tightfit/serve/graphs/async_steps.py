"""Steps whose tokens are chosen on the device, launched before the tokens of the step before are read.

The host gets a copy of the tokens one step behind, by which time it has scheduled and launched the next. An answer that
turns out to be over has then had one step too many; its token is dropped.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from tightfit.levers.side_stream import HostCopy
from tightfit.serve.graphs.steps import Steps
from tightfit.serve.sampling.random_numbers import uniform
from tightfit.serve.sampling.sampler import draw, probabilities
from tightfit.serve.schedule.device import to_device
from tightfit.serve.schedule.scheduler import Chunk
from tightfit.serve.schedule.sequence import Sequence


@dataclass
class Flight:
    """A launched step: its chunks that choose a token, and the copy of those tokens to the host."""

    chunks: list[Chunk]
    tokens: HostCopy

    def read(self) -> list[int]:
        """The tokens, once they are there."""
        return self.tokens.read()


class AsyncSteps:
    """Launches steps."""

    def __init__(self, steps: Steps) -> None:
        self.steps, self.device = steps, steps.device

    @torch.inference_mode()
    def launch(self, chunks: list[Chunk]) -> Flight:
        """Launch a step of `chunks`, which must be `ordered` (schedule/step.py)."""
        if self.steps.decodes(chunks) and all(chunk.sequence.sampling.is_greedy for chunk in chunks):
            return Flight(chunks, HostCopy(self.steps.choose_greedily(chunks)))
        logits = self.steps.logits(chunks)
        choosing = [chunk for chunk in chunks if chunk.chooses]
        if not choosing:
            return Flight([], HostCopy(self.steps.last_tokens[:0]))
        tokens = self._chosen(logits, [chunk.sequence for chunk in choosing])
        self.steps.remember(choosing, tokens)
        return Flight(choosing, HostCopy(tokens))

    def _chosen(self, logits: Tensor, sequences: Items[Sequence]) -> Tensor:
        if all(sequence.sampling.is_greedy for sequence in sequences):
            return logits.argmax(-1)
        if self.steps.runner.tiles is not None and len(sequences) > 1:  # each by itself, whatever the others ask for
            return torch.cat([self._chosen(row[None], [own]) for row, own in zip(logits, sequences, strict=True)])
        numbers = [uniform(each.sampling.seed, each.index, each.length) for each in sequences]
        chances = probabilities(logits, [each.sampling for each in sequences])
        return draw(chances, to_device(numbers, self.device, torch.float64))
