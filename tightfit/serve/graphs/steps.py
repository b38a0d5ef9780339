"""Steps of one runner: those whose shapes repeat run captured, the others as they come.

The last token of every sequence lies on the device at its slot: captured steps read it there, and a step can be
launched before the host has read the tokens of the one before it.
"""

from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor

from tightfit.kernels.triton_support import HAS_TRITON
from tightfit.serve.forward.runner import Runner
from tightfit.serve.graphs.captured import Graphs
from tightfit.serve.graphs.checks import Checks
from tightfit.serve.graphs.compiler import Compiler
from tightfit.serve.graphs.warm_up import compile_kernels
from tightfit.serve.schedule.device import to_device
from tightfit.serve.schedule.scheduler import Chunk
from tightfit.serve.schedule.step import make_step, ordered


class Steps:
    """Runs chunks of sequences through a runner."""

    def __init__(self, runner: Runner, *, repeats: bool, guesses: int = 0, prompts: bool = True) -> None:
        """`repeats`: steps of one shape share buffers, and so can be captured: decoding, steps that check up to
        `guesses` guessed tokens of each sequence and, unless told otherwise, short prompts."""
        self.runner, self.device, self.block_size = runner, runner.device, runner.cache.block_size
        self.last_tokens = torch.zeros(runner.sequences + 1, dtype=torch.int64, device=runner.device)
        self.graphs = Graphs(runner, self.last_tokens, prompts=prompts) if repeats else None
        self.checks = Checks(runner, guesses) if guesses else None

    @property
    def parts(self) -> list[Graphs | Checks]:
        """What can be captured."""
        return [part for part in (self.graphs, self.checks) if part is not None]

    @torch.inference_mode()
    def logits(self, chunks: list[Chunk]) -> Tensor:
        """Logits [R, V] where a token is chosen or a guess is checked; `chunks` must be `ordered`."""
        if self.decodes(chunks):
            return self.runner.project(self._decode(chunks))
        if all(chunk.sequence.adapter is None for chunk in chunks):
            if self.checks is not None and self.checks.takes(chunks):
                return self.checks.logits(chunks)
            if self.graphs is not None and len(chunks) == 1 and self.graphs.takes_prompt(chunks[0]):
                return self.graphs.read_prompt(chunks[0])
        step = make_step(chunks, self.block_size, self.device)
        if unknown := [(row, chunk.sequence.slot) for row, chunk in enumerate(chunks) if not _is_known(chunk)]:
            # These chunks have one token each and come first, so chunk and row are the same number.
            rows, slots = to_device(list(zip(*unknown, strict=True)), self.device, torch.int64)
            step.tokens[0].index_copy_(0, rows, self.last_tokens.index_select(0, slots))
        return self.runner.logits(step)

    @torch.inference_mode()
    def store(self, chunks: list[Chunk]) -> None:
        """Store keys and values of the tokens of `chunks`, none of which chooses."""
        chunks = ordered(chunks)
        if not chunks:
            return
        if self.graphs is not None and self._is_known_to_graphs(chunks) and all(chunk.count == 1 for chunk in chunks):
            self._decode(chunks)
        else:
            self.runner.states(make_step(chunks, self.block_size, self.device))

    def decodes(self, chunks: list[Chunk]) -> bool:
        """Whether a step of `chunks` is a captured one: the last token of each sequence, and no guesses."""
        return (
            self.graphs is not None
            and all(chunk.count == 1 and chunk.chooses and not chunk.proposal for chunk in chunks)
            and self._is_known_to_graphs(chunks)
        )

    @torch.inference_mode()
    def choose_greedily(self, chunks: list[Chunk]) -> Tensor:
        """The most likely tokens [chunks] after a step that `decodes`; `last_tokens` then has them."""
        assert self.graphs is not None
        self._decode(chunks)
        return self.graphs.choose_greedy(chunks)

    def remember(self, chunks: list[Chunk], tokens: Tensor) -> None:
        """`tokens` were chosen after `chunks`, and are the last of their sequences now."""
        slots = to_device([chunk.sequence.slot for chunk in chunks], self.device, torch.int64)
        self.last_tokens.index_copy_(0, slots, tokens)

    def _decode(self, chunks: list[Chunk]) -> Tensor:
        """States [chunks, H] of a captured step; the host's tokens are sent to the device first."""
        assert self.graphs is not None
        if known := [chunk for chunk in chunks if _is_known(chunk)]:
            self.remember(known, to_device([chunk.sequence.tokens[chunk.start] for chunk in known], self.device))
        return self.graphs.decode(chunks)

    def _is_known_to_graphs(self, chunks: list[Chunk]) -> bool:
        """Whether captured decoding has the adapters of `chunks`, if any change them here."""
        known = self.runner.adapter_numbers
        return self.runner.adapters is None or all(chunk.sequence.adapter in (None, *known) for chunk in chunks)


def capture(steps: Iterable[Steps], device: torch.device, compiler: Compiler | None) -> None:
    """Capture all that repeats, once every kernel of it is compiled; in batch-invariant steps all of them have run."""
    parts = [part for each in steps for part in each.parts]
    if HAS_TRITON and device.type == "cuda":
        trials = (part.trials() for part in parts if part.runner.tiles is None)
        compile_kernels(chain.from_iterable(trials), device, compiler)
    for part in parts:
        part.capture()


def _is_known(chunk: Chunk) -> bool:
    """Whether the host knows the tokens of a chunk."""
    return chunk.end <= len(chunk.sequence.tokens)
