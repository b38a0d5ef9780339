"""Steps whose tokens are chosen on the device, launched before the tokens of the step before are read.

The last token of every sequence lies on the device at its slot: the next step reads it there. The host gets a copy one
step behind, by which time it has scheduled and launched the next. An answer that turns out to be over has then had one
step too many; its token is dropped.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from tightfit.levers.side_stream import HostCopy
from tightfit.serve.forward.runner import Runner
from tightfit.serve.graphs.captured import Graphs
from tightfit.serve.graphs.compiler import Compiler
from tightfit.serve.sampling.random_numbers import uniform
from tightfit.serve.sampling.sampler import draw, probabilities
from tightfit.serve.schedule.device import to_device
from tightfit.serve.schedule.scheduler import Chunk
from tightfit.serve.schedule.sequence import Sequence
from tightfit.serve.schedule.step import make_step


@dataclass
class Flight:
    """A launched step: its chunks that choose a token, and the copy of those tokens to the host."""

    chunks: list[Chunk]
    tokens: HostCopy

    def read(self) -> list[int]:
        """The tokens, once they are there."""
        return self.tokens.read()


class AsyncSteps:
    """Launches steps of one runner."""

    def __init__(self, runner: Runner, *, capture: bool, compiler: Compiler | None) -> None:
        self.runner, self.device = runner, runner.device
        self.last_tokens = torch.zeros(runner.sequences + 1, dtype=torch.int64, device=runner.device)
        self.graphs = Graphs(runner, self.last_tokens)
        if capture:
            self.graphs.capture_all(compiler)

    @torch.inference_mode()
    def launch(self, chunks: list[Chunk]) -> Flight:
        """Launch a step of `chunks`, which must be `ordered` (schedule/step.py)."""
        if _is_plain(chunks) and all(chunk.count == 1 and chunk.chooses for chunk in chunks):
            return self._decode(chunks)
        choosing = [chunk for chunk in chunks if chunk.chooses]
        return self._choose(choosing, self._logits(chunks))

    def _decode(self, chunks: list[Chunk]) -> Flight:
        """A step of one token each; where all are greedy, choosing is captured as well."""
        self._send_known(chunks)
        states = self.graphs.decode(chunks)
        if all(chunk.sequence.sampling.is_greedy for chunk in chunks):
            return Flight(chunks, HostCopy(self.graphs.choose_greedy(chunks)))
        return self._choose(chunks, self.runner.project(states))

    def _choose(self, choosing: list[Chunk], logits: Tensor) -> Flight:
        slots = to_device([chunk.sequence.slot for chunk in choosing], self.device, torch.int64)
        if not choosing:
            return Flight([], HostCopy(slots))
        tokens = self._chosen(logits, [chunk.sequence for chunk in choosing])
        self.last_tokens.index_copy_(0, slots, tokens)
        return Flight(choosing, HostCopy(tokens))

    def _logits(self, chunks: list[Chunk]) -> Tensor:
        if len(chunks) == 1 and _is_plain(chunks) and self.graphs.takes_prompt(chunks[0]):
            return self.graphs.read_prompt(chunks[0])
        step = make_step(chunks, self.runner.cache.block_size, self.device)
        unknown = [(row, chunk.sequence.slot) for row, chunk in enumerate(chunks) if chunk.sequence.pending]
        if unknown:  # their chunks have one token each and come first, so chunk and row are the same number
            rows, slots = to_device(list(zip(*unknown, strict=True)), self.device, torch.int64)
            step.tokens[0].index_copy_(0, rows, self.last_tokens.index_select(0, slots))
        return self.runner.logits(step)

    def _send_known(self, chunks: list[Chunk]) -> None:
        """Copy to the device the last tokens that the host knows: of sequences without a step in flight."""
        known = [chunk.sequence for chunk in chunks if not chunk.sequence.pending]
        if known:
            slots = to_device([sequence.slot for sequence in known], self.device, torch.int64)
            tokens = to_device([sequence.tokens[-1] for sequence in known], self.device, torch.int64)
            self.last_tokens.index_copy_(0, slots, tokens)

    def _chosen(self, logits: Tensor, sequences: Items[Sequence]) -> Tensor:
        if all(sequence.sampling.is_greedy for sequence in sequences):
            return logits.argmax(-1)
        if self.runner.tiles is not None and len(sequences) > 1:  # each by itself, whatever the others ask for
            return torch.cat([self._chosen(row[None], [own]) for row, own in zip(logits, sequences, strict=True)])
        numbers = [uniform(each.sampling.seed, each.index, each.length) for each in sequences]
        chances = probabilities(logits, [each.sampling for each in sequences])
        return draw(chances, to_device(numbers, self.device, torch.float32))


def _is_plain(chunks: Items[Chunk]) -> bool:
    """Whether no adapter changes a step: captured steps have none."""
    return all(chunk.sequence.adapter is None for chunk in chunks)
