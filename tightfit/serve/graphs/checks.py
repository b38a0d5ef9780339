"""Steps that check guesses, captured: the last token of each sequence and `guesses` guessed ones after it.

Every token attends by itself, like a sequence of its own with the same blocks: keys and values of the whole step are
stored first, and a token sees those at and before its position. So a step's shape depends on the number of sequences
alone; fewer guesses, and fewer sequences, are padded by tokens that write to a block of no sequence.
"""

from collections.abc import Callable, Iterator
from copy import copy
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tightfit.serve.forward.runner import Runner
from tightfit.serve.graphs.buffers import SlotTables, Staged
from tightfit.serve.graphs.recording import Captured, Recorder
from tightfit.serve.graphs.sizes import decode_sizes
from tightfit.serve.schedule.device import to_device
from tightfit.serve.schedule.scheduler import Chunk
from tightfit.serve.schedule.step import Step

MOST_TOKENS = 512
"""Of a captured step: with more, products take so long that launches hide behind them."""
FEW_TOKENS = 64
"""So few take no longer than one: a step reads all weights."""
NUMBERS = 4
"""Rows of a step's inputs: tokens, positions, places in the cache, lengths."""


class Checks:
    """Captured steps of 1 + `guesses` tokens of each sequence."""

    def __init__(self, runner: Runner, guesses: int) -> None:
        self.runner, self.device, self.width = runner, runner.device, 1 + guesses
        self.block_size = runner.cache.block_size
        self.sizes = decode_sizes(max(1, min(runner.sequences, MOST_TOKENS // self.width)))
        columns = -(-runner.max_length // self.block_size)
        self._slot_tables = SlotTables(runner.sequences, columns)
        self._numbers = Staged((NUMBERS, self.sizes[-1] * self.width), torch.int64, self.device)
        self._tables = Staged((self.sizes[-1], columns), torch.int32, self.device)
        self._recorder = Recorder(self.device)
        self._checking: dict[int, Captured] = {}
        self._send([], self.sizes[-1])  # so that captured steps write to the block of no sequence

    def capture(self) -> None:
        """Capture everything now, the largest first: the others fit into its memory."""
        for size in sorted(self.sizes, reverse=True):
            self._checking[size] = self._recorder.record(partial(self._check, size))

    def trials(self) -> Iterator[Callable[[], Tensor]]:
        """Every step that will be captured, through only as many layers as launch all kernels, and its projection."""
        few = copy(self)
        few.runner = self.runner.shortened()
        for size in self.sizes:
            yield lambda size=size: few.runner.project(few._check(size))  # type: ignore[misc]

    def takes(self, chunks: list[Chunk]) -> bool:
        """Whether a step of `chunks` is one of these, one known token of each sequence and its guesses, and not mostly
        padding."""
        tokens = sum(1 + len(chunk.proposal) for chunk in chunks)
        return (
            len(chunks) <= self.sizes[-1]
            and len(chunks) * self.width <= max(FEW_TOKENS, 2 * tokens)
            and all(chunk.count == 1 and chunk.chooses for chunk in chunks)
        )

    def logits(self, chunks: list[Chunk]) -> Tensor:
        """Logits [R, V] after the last known token of each chunk and after each of its guesses."""
        size = next(size for size in self.sizes if size >= len(chunks))
        self._send(chunks, size)
        run = self._checking.get(size) or Captured(partial(self._check, size))
        return self.runner.project(self._wanted(run(), chunks))

    def _send(self, chunks: list[Chunk], size: int) -> None:
        """The inputs of a step of `size` sequences, padding beside those of `chunks`, to the device."""
        padding, width = self.runner.cache.padding_block, self.width
        numbers, tables = self._numbers.host(), self._tables.host()
        numbers[:] = np.array([0, 0, padding * self.block_size, 1])[:, None]
        tables[:] = padding
        for index, chunk in enumerate(chunks):
            own = chunk.sequence
            self._slot_tables.note(own)
            table = tables[index] = self._slot_tables.rows[own.slot]
            positions = chunk.start + np.arange(1 + len(chunk.proposal))
            numbers[:, index * width : index * width + len(positions)] = (
                [own.tokens[chunk.start], *chunk.proposal],
                positions,
                table[positions // self.block_size].astype(np.int64) * self.block_size + positions % self.block_size,
                positions + 1,
            )
        self._numbers.send()
        self._tables.send(size)

    def _check(self, size: int) -> Tensor:
        """States [size · width, H]."""
        count = size * self.width
        tokens, positions, places, lengths = self._numbers.device_side[:, :count]
        step = Step(
            tokens=tokens[None],
            positions=positions[None],
            slots=places,
            decode_tokens=count,
            tables=self._tables.device_side[:size].repeat_interleave(self.width, 0, output_size=count),
            lengths=lengths,
            longest=self.runner.max_length,
            rows=places,  # as many as there are tokens: all of them
            block_size=self.block_size,
            row_by_row=True,
        )
        return self.runner.states(step)

    def _wanted(self, states: Tensor, chunks: list[Chunk]) -> Tensor:
        """The states of tokens that are no padding."""
        if all(len(chunk.proposal) + 1 == self.width for chunk in chunks):
            return states[: len(chunks) * self.width]
        rows = [index * self.width + np.arange(1 + len(chunk.proposal)) for index, chunk in enumerate(chunks)]
        return states.index_select(0, to_device(np.concatenate(rows), self.device))
