"""Steps whose shapes repeat, captured once as CUDA graphs and replayed: launching a hundred kernels costs as one.

Decoding steps are captured for a few numbers of sequences, short prompts for a few lengths; a step is padded to the
next of them. Padding writes to a block of the cache that belongs to no sequence. Inputs lie in device buffers with
fixed addresses; the host fills pinned copies, which are sent asynchronously, so nothing waits. A decoding step takes
its tokens from where the step before left them on the device. Where nothing can be captured (CPUs) the same steps run
without graphs.
"""

from collections.abc import Callable, Iterator
from copy import copy
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tightfit.kernels.decoding.greedy import choose_greedily
from tightfit.serve.forward.runner import Runner
from tightfit.serve.graphs.buffers import SlotTables, Staged
from tightfit.serve.graphs.recording import Captured, Recorder
from tightfit.serve.graphs.sizes import decode_sizes
from tightfit.serve.graphs.warm_up import mixed_steps
from tightfit.serve.schedule.scheduler import Chunk
from tightfit.serve.schedule.step import Piece, Step

PROMPT_SIZES = (64, 128, 256, 512)
NUMBERS = 5
"""Rows of a decoding step's inputs: the sequences' slots, positions, places in the cache, lengths, adapters."""
Kind = tuple[int, bool]
"""Of decoding steps: the number of sequences, and whether any has an adapter."""


class Graphs:
    """Captured decoding steps and short prompts of one runner."""

    def __init__(self, runner: Runner, last_tokens: Tensor, *, prompts: bool = True) -> None:
        """`prompts`: short prompts too."""
        self.runner, self.last_tokens, self.device = runner, last_tokens, runner.device
        self.block_size, self.padding_block = runner.cache.block_size, runner.cache.padding_block
        sequences, self.max_length = runner.sequences, runner.max_length
        self.sizes = decode_sizes(sequences)
        self.columns = -(-self.max_length // self.block_size)
        self._numbers = Staged((NUMBERS, sequences), torch.int64, self.device)
        self._tables = Staged((sequences, self.columns), torch.int32, self.device)
        self._slot_tables = SlotTables(sequences, self.columns)
        self._counters = torch.zeros(sequences, device=self.device, dtype=torch.int32)
        self._prompt = Staged((3, PROMPT_SIZES[-1]), torch.int64, self.device)
        longest = self.max_length if prompts and runner.tiles is None else 0
        self._prompt_sizes = [size for size in PROMPT_SIZES if size <= longest]
        self._recorder = Recorder(self.device)
        self._longest = self.max_length  # of a step's sequences; used without a graph
        ways = (False, True) if runner.adapter_numbers else (False,)
        self._kinds = [(size, adapted) for adapted in ways for size in self.sizes]
        self._decoding: dict[Kind, Captured] = {}
        self._choosing: dict[Kind, Captured] = {}
        self._states: dict[Kind, Tensor] = {}
        self._prompts: dict[int, Captured] = {}
        self._send_padding()

    def _send_padding(self) -> None:
        """Inputs with which captured steps write to the block of no sequence."""
        numbers, tables, prompt = self._numbers.host(), self._tables.host(), self._prompt.host()
        numbers[:], tables[:], prompt[1] = self._padding, self.padding_block, self.padding_block * self.block_size
        for staged in (self._numbers, self._tables, self._prompt):
            staged.send()

    @property
    def _padding(self) -> "np.ndarray":
        """Slot, position, place in the cache, length and adapter of a sequence that is none."""
        place = self.padding_block * self.block_size
        return np.array([len(self.last_tokens) - 1, 0, place, 1, -1])[:, None]

    def capture(self) -> None:
        """Capture everything now, the largest first: the others fit into its memory."""
        for kind in sorted(self._kinds, reverse=True):
            self._decoding[kind] = decoding = self._recorder.record(partial(self._decode, kind))
            self._states[kind] = decoding.output if decoding.output is not None else decoding()
            self._choosing[kind] = self._recorder.record(partial(self._choose, kind))
        for size in sorted(self._prompt_sizes, reverse=True):
            self._prompts[size] = self._recorder.record(partial(self._read_prompt, size))

    def trials(self) -> Iterator[Callable[[], Tensor]]:
        """Every step that will be captured, and mixed steps, each through only as many layers as launch all kernels.

        Steps with the most kernels come first: these are compiled while the later steps are tried.
        """
        few = copy(self)
        few.runner, few.last_tokens, few._states = self.runner.shortened(), torch.zeros_like(self.last_tokens), {}
        ends = {kind for kind in self._kinds if kind[0] in (*self.sizes[:2], self.sizes[-1])}
        for kind in sorted(ends):
            yield partial(few._try_decoding, kind)
        for step in mixed_steps(self.block_size, self.padding_block, self.max_length, self.device):
            yield partial(few.runner.logits, step)
        for size in self._prompt_sizes:
            yield partial(few._read_prompt, size)
        for kind in self._kinds:
            if kind not in ends:
                yield partial(few._try_decoding, kind)

    def takes_prompt(self, chunk: Chunk) -> bool:
        """Whether a chunk, alone in its step, is a whole prompt short enough for a graph."""
        return chunk.start == 0 and chunk.chooses and chunk.count <= max(self._prompt_sizes, default=0)

    def decode(self, chunks: list[Chunk]) -> Tensor:
        """States [chunks, H] of a step with one token of each sequence; call `choose_greedy` or a projection next."""
        count, kind = len(chunks), self._kind(chunks)
        size, known = kind[0], self.runner.adapter_numbers
        numbers = self._numbers.host()
        for chunk in chunks:
            self._slot_tables.note(chunk.sequence)
        slots = np.array([chunk.sequence.slot for chunk in chunks])
        last = np.array([chunk.start for chunk in chunks])
        blocks = self._slot_tables.rows[slots, last // self.block_size].astype(np.int64)
        numbers[:4, :count] = slots, last, blocks * self.block_size + last % self.block_size, last + 1
        numbers[4, :count] = [known.get(chunk.sequence.adapter or "", -1) for chunk in chunks] if kind[1] else -1
        numbers[:, count:size] = self._padding
        self._longest = int(last.max()) + 1
        tables = self._tables.host()
        tables[:count] = self._slot_tables.rows[slots]
        tables[count:size] = self.padding_block
        self._numbers.send()
        self._tables.send(size)
        self._states[kind] = (self._decoding.get(kind) or Captured(partial(self._decode, kind)))()
        return self._states[kind][:count]

    def choose_greedy(self, chunks: list[Chunk]) -> Tensor:
        """The most likely tokens [chunks] after the step of `chunks` that `decode` has just run; also written to
        `last_tokens` at their sequences' slots, where the next step reads them."""
        kind = self._kind(chunks)
        return (self._choosing.get(kind) or Captured(partial(self._choose, kind)))()[: len(chunks)]

    def _kind(self, chunks: list[Chunk]) -> Kind:
        size = next(size for size in self.sizes if size >= len(chunks))
        return size, self._kinds[-1][1] and any(chunk.sequence.adapter is not None for chunk in chunks)

    def read_prompt(self, chunk: Chunk) -> Tensor:
        """Logits [1, V] after a short prompt."""
        size = next(size for size in self._prompt_sizes if size >= chunk.count)
        host, count, blocks = self._prompt.host(), chunk.count, np.array(chunk.sequence.blocks)
        places = np.arange(count)
        host[0, :count] = chunk.sequence.tokens[:count]
        host[0, count:size] = 0
        host[1, :count] = blocks[places // self.block_size] * self.block_size + places % self.block_size
        host[1, count:size] = self.padding_block * self.block_size
        host[2, 0] = count - 1
        self._prompt.send()
        return self.runner.project((self._prompts.get(size) or Captured(partial(self._read_prompt, size)))())

    def _decode(self, kind: Kind) -> Tensor:
        size, adapted = kind
        slots, positions, places, lengths, adapters = self._numbers.device_side[:, :size]
        step = Step(
            tokens=self.last_tokens.index_select(0, slots)[None],
            positions=positions[None],
            slots=places,
            decode_tokens=size,
            tables=self._tables.device_side[:size],
            lengths=lengths,
            longest=self._longest,
            rows=slots,  # as many as there are tokens: all of them
            block_size=self.block_size,
            adapter_of=adapters if adapted else None,
        )
        return self.runner.states(step)

    def _try_decoding(self, kind: Kind) -> Tensor:
        self.last_tokens.zero_()  # where kernels were not launched, it may hold no valid tokens
        self._states[kind] = self._decode(kind)
        return self._choose(kind)

    def _choose(self, kind: Kind) -> Tensor:
        logits = self.runner.project(self._states[kind])
        return choose_greedily(logits, self.last_tokens, self._numbers.device_side[0, : kind[0]], self._counters)

    def _read_prompt(self, size: int) -> Tensor:
        tokens, places, rows = self._prompt.device_side
        step = Step(
            tokens=tokens[None, :size],
            positions=torch.arange(size, device=self.device)[None],
            slots=places[:size],
            decode_tokens=0,
            tables=places.new_zeros((0, 0), dtype=torch.int32),
            lengths=places[:0],
            pieces=[Piece(0, size, 0, [])],
            rows=rows[:1],
            block_size=self.block_size,
        )
        return self.runner.states(step)
