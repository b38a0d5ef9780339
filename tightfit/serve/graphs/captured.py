"""Steps whose shapes repeat, captured once as CUDA graphs and replayed: launching a hundred kernels costs as one.

Decoding steps are captured for a few numbers of sequences, short prompts for a few lengths; a step is padded to the
next of them. Padding writes to a block of the cache that belongs to no sequence. Inputs lie in device buffers with
fixed addresses; the host fills pinned copies, which are sent asynchronously, so nothing waits. A decoding step takes
its tokens from where the step before left them on the device. Where nothing can be captured (CPUs) the same steps run
without graphs.
"""

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tightfit.kernels.capture import capturing
from tightfit.kernels.greedy import choose_greedily
from tightfit.kernels.triton_support import HAS_TRITON
from tightfit.serve.forward.runner import Runner
from tightfit.serve.graphs.compiler import Compiler
from tightfit.serve.graphs.warm_up import compile_kernels, mixed_steps
from tightfit.serve.schedule.scheduler import Chunk
from tightfit.serve.schedule.sequence import Sequence
from tightfit.serve.schedule.step import Piece, Step

PROMPT_SIZES = (64, 128, 256, 512)
NUMBERS = 4
"""Rows of a decoding step's inputs: the sequences' slots, positions, places in the cache, lengths."""


def decode_sizes(most: int) -> list[int]:
    """Numbers of sequences that graphs are captured for: small powers of two, then eights, then sixteens."""
    sizes = [size for size in (1, 2, 4, 8, 16, *range(24, 65, 8), *range(80, most + 16, 16)) if size < most]
    return [*sizes, most]


@dataclass
class Captured:
    """A function without arguments, replayed as a graph where one was captured. Its output is kept for every captured
    size: so a graph of the layers returns states, and the output projection is a graph of its own, whose logits lie in
    memory that all sizes share."""

    run: Callable[[], Tensor]
    graph: "torch.cuda.CUDAGraph | None"
    output: Tensor | None = None

    def __call__(self) -> Tensor:
        if self.graph is None:
            return self.run()
        self.graph.replay()
        assert self.output is not None
        return self.output


class Staged:
    """A buffer on the device and two pinned copies on the host, used in turn: one may still be being sent."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.device_side = torch.zeros(shape, dtype=dtype, device=device)
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(shape, dtype=dtype, pin_memory=pinned) for _ in range(2)]
        self._turn = 0

    def host(self) -> "np.ndarray":
        """The host's copy to fill before the next `send`."""
        return self._hosts[self._turn].numpy()

    def send(self, rows: int | None = None) -> None:
        """Copy the first `rows` to the device."""
        host = self._hosts[self._turn]
        self.device_side[:rows].copy_(host[:rows], non_blocking=True)
        self._turn = 1 - self._turn


class Graphs:
    """Captured decoding steps and short prompts of one runner."""

    def __init__(self, runner: Runner, last_tokens: Tensor) -> None:
        self.runner, self.last_tokens, self.device = runner, last_tokens, runner.device
        self.block_size, self.padding_block = runner.cache.block_size, runner.cache.padding_block
        sequences, self.max_length = runner.sequences, runner.max_length
        self.sizes = decode_sizes(sequences)
        self.columns = -(-self.max_length // self.block_size)
        self._numbers = Staged((NUMBERS, sequences), torch.int64, self.device)
        self._tables = Staged((sequences, self.columns), torch.int32, self.device)
        self._by_slot = np.zeros((sequences, self.columns), dtype=np.int32)
        self._counters = torch.zeros(sequences, device=self.device, dtype=torch.int32)
        # Per slot: the list of blocks that its table was filled from, and how many of them.
        self._known: list[tuple[list[int] | None, int]] = [(None, 0)] * sequences
        self._prompt = Staged((3, PROMPT_SIZES[-1]), torch.int64, self.device)
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self._longest = self.max_length  # of a step's sequences; used without a graph
        self._decoding: dict[int, Captured] = {}
        self._choosing: dict[int, Captured] = {}
        self._states: dict[int, Tensor] = {}
        self._prompts: dict[int, Captured] = {}

    def capture_all(self, compiler: Compiler | None) -> None:
        """Capture everything now, the largest first: the others fit into its memory."""
        if HAS_TRITON and self.device.type == "cuda" and self.runner.tiles is None:  # RowTiles has run all kernels
            compile_kernels(self.trials(), self.device, compiler)
        for size in sorted(self.sizes, reverse=True):
            self._decoding[size] = decoding = self._captured(partial(self._decode, size))
            self._states[size] = decoding.output if decoding.output is not None else decoding()
            self._choosing[size] = self._captured(partial(self._choose, size))
        for size in sorted(self._prompt_sizes, reverse=True):
            self._prompts[size] = self._captured(partial(self._read_prompt, size))

    def trials(self) -> Iterator[Callable[[], Tensor]]:
        """Every step that will be captured, and mixed steps, each through only as many layers as launch all kernels.

        Steps with the most kernels come first: these are compiled while the later steps are tried.
        """
        few = copy(self)
        few.runner, few.last_tokens, few._states = self.runner.shortened(), torch.zeros_like(self.last_tokens), {}
        ends = {*self.sizes[:2], self.sizes[-1]}
        for size in sorted(ends):
            yield partial(few._try_decoding, size)
        for step in mixed_steps(self.block_size, self.padding_block, self.max_length, self.device):
            yield partial(few.runner.logits, step)
        for size in self._prompt_sizes:
            yield partial(few._read_prompt, size)
        for size in self.sizes:
            if size not in ends:
                yield partial(few._try_decoding, size)

    def takes_prompt(self, chunk: Chunk) -> bool:
        """Whether a chunk, alone in its step, is a whole prompt short enough for a graph."""
        longest = max((size for size in PROMPT_SIZES if size <= self.max_length), default=0)
        return self.runner.tiles is None and chunk.start == 0 and chunk.chooses and chunk.count <= longest

    def decode(self, chunks: list[Chunk]) -> Tensor:
        """States [chunks, H] of a step with one token of each sequence; call `choose_greedy` or a projection next."""
        count, size = len(chunks), self._size(chunks)
        numbers = self._numbers.host()
        for chunk in chunks:
            self._note_blocks(chunk.sequence)
        slots = np.array([chunk.sequence.slot for chunk in chunks])
        last = np.array([chunk.start for chunk in chunks])
        blocks = self._by_slot[slots, last // self.block_size].astype(np.int64)
        numbers[:, :count] = slots, last, blocks * self.block_size + last % self.block_size, last + 1
        padding = self.padding_block * self.block_size
        numbers[:, count:size] = np.array([len(self.last_tokens) - 1, 0, padding, 1])[:, None]
        self._longest = int(last.max()) + 1
        tables = self._tables.host()
        tables[:count] = self._by_slot[slots]
        tables[count:size] = self.padding_block
        self._numbers.send()
        self._tables.send(size)
        self._states[size] = self._get(self._decoding, size, self._decode)()
        return self._states[size][:count]

    def choose_greedy(self, chunks: list[Chunk]) -> Tensor:
        """The most likely tokens [chunks] after the step of `chunks` that `decode` has just run; also written to
        `last_tokens` at their sequences' slots, where the next step reads them."""
        return self._get(self._choosing, self._size(chunks), self._choose)()[: len(chunks)]

    @property
    def _prompt_sizes(self) -> list[int]:
        return [size for size in PROMPT_SIZES if size <= self.max_length and self.runner.tiles is None]

    def _size(self, chunks: list[Chunk]) -> int:
        return next(size for size in self.sizes if size >= len(chunks))

    def read_prompt(self, chunk: Chunk) -> Tensor:
        """Logits [1, V] after a short prompt."""
        size = next((size for size in PROMPT_SIZES if size >= chunk.count), PROMPT_SIZES[-1])
        host, count, blocks = self._prompt.host(), chunk.count, np.array(chunk.sequence.blocks)
        places = np.arange(count)
        host[0, :count] = chunk.sequence.tokens[:count]
        host[0, count:size] = 0
        host[1, :count] = blocks[places // self.block_size] * self.block_size + places % self.block_size
        host[1, count:size] = self.padding_block * self.block_size
        host[2, 0] = count - 1
        self._prompt.send()
        return self.runner.project(self._get(self._prompts, size, self._read_prompt)())

    def _note_blocks(self, sequence: Sequence) -> None:
        """Bring the block table of the sequence's slot up to date; the sequence gets a new list of blocks whenever it
        is admitted."""
        slot, blocks = sequence.slot, sequence.blocks
        whose, known = self._known[slot]
        if whose is not blocks or known != len(blocks):
            known = known if whose is blocks else 0
            self._by_slot[slot, known : len(blocks)] = blocks[known:]
            self._known[slot] = (blocks, len(blocks))

    def _decode(self, size: int) -> Tensor:
        slots, positions, places, lengths = self._numbers.device_side[:, :size]
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
        )
        return self.runner.states(step)

    def _try_decoding(self, size: int) -> Tensor:
        self.last_tokens.zero_()  # where kernels were not launched, it may hold no valid tokens
        self._states[size] = self._decode(size)
        return self._choose(size)

    def _choose(self, size: int) -> Tensor:
        logits = self.runner.project(self._states[size])
        return choose_greedily(logits, self.last_tokens, self._numbers.device_side[0, :size], self._counters)

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

    def _get(self, kept: dict[int, Captured], size: int, run: Callable[[int], Tensor]) -> Captured:
        return kept.get(size) or Captured(partial(run, size), None)

    @torch.inference_mode()
    def _captured(self, run: Callable[[], Tensor]) -> Captured:
        """`run` captured as a graph, after a run outside of it: first calls compile kernels and set up libraries."""
        if self.device.type != "cuda":
            return Captured(run, None)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, pool=self._pool):
            output = run()
        return Captured(run, graph, output)
