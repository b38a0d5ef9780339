"""What the next step computes: continuous batching with chunked prefill, priorities and preemption.

Every step takes one token of each answer that is under way, and fills the rest of its token budget with prompts, in
pieces where they are long (Sarathi, Agrawal et al. 2023): no answer waits for another request's prompt. A prompt gets
all its blocks when it is admitted, an answer one more whenever the last is full. When none is left, the sequence that
comes last in the order (priority, arrival) is preempted: it frees all its blocks and waits. It is computed again later,
often from blocks that are still in the cache, or copied back from the host where it was saved there (`host`).
A waiting sequence of a better priority preempts a running one of a worse. Where layers have a window, `windows` says
which pages of the blocks they keep.

Nothing here knows a model or a device: lengths are enough.
"""

import heapq
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from tightfit.serve.requests.request import Finish
from tightfit.serve.schedule.block_pool import BlockPool, Digest
from tightfit.serve.schedule.sequence import Sequence
from tightfit.serve.schedule.window_pages import WindowPages


class Host(Protocol):
    """Keeps keys and values of preempted sequences."""

    def save(self, sequence: Sequence) -> None:
        """Called before a sequence loses its blocks."""

    def restore(self, sequence: Sequence) -> None:
        """Called when a sequence has blocks again and `stored` says how much was found in them; may raise `stored`."""

    def drop(self, sequence: Sequence) -> None:
        """Called when a sequence is over."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much one step may do."""

    sequences: int = 64
    step_tokens: int = 2048
    prefix_cache: bool = True
    lookahead: int = 0
    """Guessed tokens that a step may check beside an answer's own token, at most."""
    rewind_at: int | None = None
    """The length beyond which all keys of a sequence have to be computed again, with other frequencies (LongRoPE)."""


@dataclass(eq=False, slots=True)
class Chunk:
    """`count` positions of a sequence from `start` on, and room for `lookahead` guesses after them."""

    sequence: Sequence
    start: int
    count: int
    lookahead: int = 0
    proposal: list[int] = field(default_factory=list)
    chooses: bool = False
    """Whether the next token is chosen after it: it has the sequence's last position."""

    @property
    def end(self) -> int:
        """The first position after it, guesses aside."""
        return self.start + self.count


class Scheduler:
    """Which sequences wait, which run, and what each running one computes next."""

    def __init__(
        self, pool: BlockPool, limits: Limits, host: Host | None = None, windows: WindowPages | None = None
    ) -> None:
        self.pool, self.limits, self.host, self.windows = pool, limits, host, windows
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._waiting: list[tuple[tuple[int, int, int], int, Sequence]] = []
        self._entries = 0
        self._waiting_count = 0
        self._slots = list(range(limits.sequences))[::-1]
        self._preempted: set[Sequence] = set()  # in the schedule being made

    @property
    def waiting(self) -> int:
        """Sequences that wait for their first or next blocks."""
        return self._waiting_count

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.running) or self._waiting_count > 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. At its full length it must fit the empty pool: then it can always be finished."""
        assert self.pool.blocks_for(sequence.longest) <= self.pool.size
        assert sequence.state == "new"
        self._push(sequence)

    def remove(self, sequence: Sequence, finish: Finish) -> None:
        """Take out a sequence that is over or cancelled, also before it was added; its blocks are free at once."""
        if sequence.state == "finished":
            return
        if sequence.state == "running":
            self._stop(sequence)
        elif sequence.state == "waiting":
            self._waiting_count -= 1  # its entry in the heap is passed over later
            if self.host is not None:
                self.host.drop(sequence)
        sequence.state, sequence.finish = "finished", finish

    def schedule(self) -> list[Chunk]:
        """The next step: chunks of different sequences, single tokens of answers under way first."""
        self._preempted = set()
        if self.limits.rewind_at is not None:
            self._rewind(self.limits.rewind_at)
        if self.windows is not None:
            self.windows.begin_step()
            for sequence in self.running:
                self.windows.move(sequence, sequence.stored, sequence.stored)
        chunks, prompts = self._answers()
        budget = self.limits.step_tokens - sum(chunk.count + chunk.lookahead for chunk in chunks)
        for sequence in prompts:
            if budget > 0 and sequence.state == "running" and self._has_blocks(sequence):
                chunks.append(self._piece(sequence, budget))
                budget -= chunks[-1].count
        while budget > 0 and (admitted := self._admitted()) is not None:
            chunks.append(self._piece(admitted, budget))
            budget -= chunks[-1].count
        return [chunk for chunk in chunks if chunk.sequence not in self._preempted] if self._preempted else chunks

    def mark_launched(self, chunks: Iterable[Chunk]) -> None:
        """Count what a launched step of `chunks` will store as stored, and the tokens it will choose as pending."""
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.stored = chunk.start + chunk.count
            sequence.pending += chunk.chooses

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Put blocks of a sequence that have become full of known tokens into the prefix cache."""
        if not self.limits.prefix_cache or sequence.state != "running":
            return
        full = min(sequence.stored, len(sequence.tokens)) // self.pool.block_size
        if full > sequence.remembered:
            digests = sequence.digests_of(full, self.pool.block_size)
            for index in range(sequence.remembered, full):
                self._remember(sequence.blocks[index], digests[index])
            sequence.remembered = full

    def _remember(self, block: int, digest: Digest) -> None:
        """Let a full block be found; an equal one gives way to it where its page is gone, which would help nobody."""
        if self.windows is not None:
            for known in self.pool.find([digest]):
                if not self.windows.has_page(known):
                    self.pool.forget(known)
        self.pool.remember(block, digest)

    def _rewind(self, length: int) -> None:
        """Have sequences that have just grown beyond `length` computed again, in the blocks they have."""
        for sequence in self.running:
            if sequence.length > length and not sequence.rewound:
                sequence.rewound, sequence.stored, sequence.draft_stored = True, 0, 0

    def _answers(self) -> tuple[list[Chunk], list[Sequence]]:
        """The next token of every answer under way, and the sequences that have more than one position to store.

        This runs for every answer of every step: hundreds of times in the milliseconds a step takes.
        """
        budget, chunks, prompts = self.limits.step_tokens, [], []
        block_size, most = self.pool.block_size, self.limits.lookahead
        for sequence in tuple(self.running):
            stored, length = sequence.stored, len(sequence.tokens) + sequence.pending
            if length - stored > 1:
                prompts.append(sequence)
            elif length == stored or length - len(sequence.prompt) >= sequence.sampling.max_tokens:
                continue  # the last token, once chosen, has none after it
            elif budget > 0 and sequence.state == "running":
                if length > len(sequence.blocks) * block_size and not self._has_blocks(sequence):
                    continue
                lookahead = self._lookahead(sequence, budget - 1) if most else 0
                self._see(sequence, stored, stored + 1 + lookahead)
                chunks.append(Chunk(sequence, stored, 1, lookahead, chooses=True))
                budget -= 1 + lookahead
        return [each for each in chunks if each.sequence not in self._preempted] if self._preempted else chunks, prompts

    def _has_blocks(self, sequence: Sequence) -> bool:
        """Take blocks for all positions of a running sequence, preempting others; False if it was preempted itself."""
        need = self.pool.blocks_for(sequence.length) - len(sequence.blocks)
        while need > self.pool.free and sequence.state == "running":
            self._preempt(self.running[-1])
        if sequence.state != "running":
            return False
        sequence.blocks += self._take(max(need, 0))
        return True

    def _take(self, count: int) -> list[int]:
        blocks = self.pool.take(count)
        if self.windows is not None:
            self.windows.forget(blocks)
        return blocks

    def _see(self, sequence: Sequence, start: int, end: int) -> None:
        """Keep what tokens at [start, end) see in layers with a window."""
        if self.windows is not None:
            self.windows.move(sequence, start, end)

    def _room(self, sequence: Sequence, count: int) -> int:
        """For how many of its next `count` tokens layers with a window have room."""
        return count if self.windows is None else self.windows.room(sequence, sequence.stored, count)

    def _lookahead(self, sequence: Sequence, budget: int) -> int:
        """How many guesses there is room for, in the budget, the answer and the pool."""
        left = sequence.sampling.max_tokens - sequence.generated - 1
        if self.limits.rewind_at is not None and sequence.length <= self.limits.rewind_at:
            left = min(left, self.limits.rewind_at - sequence.length)
        wanted = min(self.limits.lookahead, budget, left, self._room(sequence, 1 + self.limits.lookahead) - 1)
        if wanted <= 0 or sequence.pending:
            return 0
        need = self.pool.blocks_for(sequence.length + wanted) - len(sequence.blocks)
        if need > self.pool.free:
            return 0
        sequence.blocks += self._take(max(need, 0))
        return wanted

    def _piece(self, sequence: Sequence, budget: int) -> Chunk:
        count = self._room(sequence, min(sequence.length - sequence.stored, budget))
        self._see(sequence, sequence.stored, sequence.stored + count)
        return Chunk(sequence, sequence.stored, count, chooses=sequence.stored + count == sequence.length)

    def _admitted(self) -> Sequence | None:
        """The first sequence in the queue, now running, if there are a slot, blocks for all its positions so far, and
        pages for its window."""
        sequence = self._first_waiting()
        if sequence is None or sequence.pending or sequence in self._preempted:
            return None
        while not self._fits(sequence):
            last = self.running[-1] if self.running else None
            if last is None or last.priority <= sequence.priority:
                return None
            self._preempt(last)
        heapq.heappop(self._waiting)
        self._waiting_count -= 1
        self._start(sequence)
        return sequence

    def _fits(self, sequence: Sequence) -> bool:
        found = self._found(sequence)
        need = self.pool.blocks_for(sequence.length) - len(found) + self.pool.free_among(found)
        has_pages = self.windows is None or self.windows.fits(sequence)
        return bool(self._slots) and need <= self.pool.free and has_pages

    def _found(self, sequence: Sequence) -> list[int]:
        """Blocks of its prefix that are in the cache; its last position is computed in any case."""
        if not self.limits.prefix_cache:
            return []
        full = (sequence.length - 1) // self.pool.block_size
        found = self.pool.find(sequence.digests_of(full, self.pool.block_size))
        return found if self.windows is None else list(self.windows.usable(found))

    def _start(self, sequence: Sequence) -> None:
        found = self._found(sequence)
        self.pool.hold(found)
        sequence.stored = sequence.draft_stored = len(found) * self.pool.block_size
        sequence.remembered = len(found)
        sequence.blocks = [*found, *self._take(self.pool.blocks_for(sequence.length) - len(found))]
        if self.windows is not None:
            self.windows.promise(sequence)
        self._see(sequence, sequence.stored, sequence.stored)
        sequence.rewound = self.limits.rewind_at is not None and sequence.length > self.limits.rewind_at
        if not sequence.preemptions:
            sequence.cached = sequence.stored
        if self.host is not None:
            self.host.restore(sequence)
        sequence.slot, sequence.state = self._slots.pop(), "running"
        insort(self.running, sequence, key=lambda each: each.order)

    def _stop(self, sequence: Sequence) -> None:
        """Release the blocks and the slot of a running sequence."""
        self.running.remove(sequence)
        if self.windows is not None:
            self.windows.drop(sequence)
        self.pool.release(sequence.blocks)
        self._slots.append(sequence.slot)
        sequence.blocks, sequence.stored, sequence.draft_stored, sequence.remembered = [], 0, 0, 0
        sequence.slot = -1

    def _preempt(self, sequence: Sequence) -> None:
        if self.host is not None:
            self.host.save(sequence)
        self._stop(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self._preempted.add(sequence)
        self._push(sequence)

    def _push(self, sequence: Sequence) -> None:
        sequence.state = "waiting"
        self._entries += 1
        heapq.heappush(self._waiting, (sequence.order, self._entries, sequence))
        self._waiting_count += 1

    def _first_waiting(self) -> Sequence | None:
        while self._waiting and self._waiting[0][2].state != "waiting":
            heapq.heappop(self._waiting)
        return self._waiting[0][2] if self._waiting else None
