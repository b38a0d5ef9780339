"""The pages of layers with a window: keys and values of the positions that running sequences still see there.

A block (block_pool.py) is a place for positions of a sequence in all layers that keep every position. Layers with a
window see the last `window` positions alone, so of a block they have a page only while the window of a running sequence
reaches it. There are fewer pages than blocks: memory holds longer sequences, and more of them. A page that no sequence
sees keeps its contents until it is taken, the least recently seen first, so that prefixes can be found again.

A block has one page whoever holds it, so with as many pages as blocks there is always a page to take. With fewer, a
sequence runs only if pages for its window can be promised to it, beside those of all others that run. What nobody has
been promised is lent to the tokens of a step: pieces of prompts are as long as there are pages for, together at least
LEAST_PIECE.
"""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Items

import numpy as np

from tightfit.memory.formulas.serving import pages_for
from tightfit.serve.schedule.sequence import Sequence

LEAST_PIECE = 512
"""Tokens of prompts that have pages in every step, however many sequences run: enough to keep a GPU busy."""


def least_pages(window: int, step_tokens: int, block_size: int) -> int:
    """Pages with which one sequence can run."""
    return pages_for(window, 1, min(step_tokens, LEAST_PIECE), block_size)


class WindowPages:
    """Which of `pages` pages each of `blocks` blocks has; page number `pages` is for padding."""

    def __init__(self, *, pages: int, blocks: int, block_size: int, window: int, step_tokens: int) -> None:
        assert pages == blocks or least_pages(window, step_tokens, block_size) <= pages < blocks
        self.pages, self.block_size, self.window = pages, block_size, window
        self.of_block = np.full(blocks + 1, pages, dtype=np.int32)
        """The page of each block; of blocks without one, and of the padding block, the page for padding."""
        self.has_changed = True
        """Whether `of_block` has changed since the device got it."""
        self._blocks: list[int | None] = [None] * pages
        self._readers = [0] * blocks
        self._idle = OrderedDict.fromkeys(range(pages))  # seen by no sequence, in the order in which they will be taken
        self._held: dict[Sequence, range] = {}
        self._promised: dict[Sequence, int] = {}
        self._unpromised, self._lent = pages, 0
        self._kept = pages_for(window, 0, min(step_tokens, LEAST_PIECE), block_size)

    @property
    def is_ample(self) -> bool:
        """Whether there is a page for every block."""
        return self.pages == len(self._readers)

    def begin_step(self) -> None:
        """What was lent to tokens of the last step can be lent again."""
        self._lent = 0

    def fits(self, sequence: Sequence) -> bool:
        """Whether pages can be promised to a sequence."""
        return self.is_ample or self._most(sequence) <= self._unpromised - max(self._kept, self._lent)

    def promise(self, sequence: Sequence) -> None:
        """Keep pages for a sequence that runs from now on, until it is dropped."""
        self._promised[sequence] = self._most(sequence)
        self._unpromised -= self._promised[sequence]

    def room(self, sequence: Sequence, start: int, count: int) -> int:
        """For how many of `count` tokens from `start` on there are pages in this step: for a block of them at least."""
        if self.is_ample:
            return count
        most = self._promised[sequence] + self._unpromised - self._lent
        return min(count, (self.first_seen(start) + most) * self.block_size - start)

    def move(self, sequence: Sequence, start: int, end: int) -> None:
        """Hold the pages that tokens at [start, end) of a running sequence see or write, and no others of it."""
        held = self._held.get(sequence, range(0))
        seen = range(self.first_seen(start), -(-end // self.block_size))
        if seen == held:
            return
        for index in held:
            if index not in seen:
                self._release(sequence.blocks[index])
        for index in seen:
            if index not in held:
                self._hold(sequence.blocks[index])
        self._held[sequence] = seen
        self._lent += max(0, len(seen) - self._promised[sequence])

    def drop(self, sequence: Sequence) -> None:
        """Hold no pages of a sequence that stops; it still has its blocks."""
        self._unpromised += self._promised.pop(sequence)
        for index in self._held.pop(sequence, range(0)):
            self._release(sequence.blocks[index])

    def forget(self, blocks: Iterable[int]) -> None:
        """`blocks` were taken for new contents: the pages of their old ones are the first to be taken."""
        for block in blocks:
            page = int(self.of_block[block])
            if page < self.pages:
                self.of_block[block], self._blocks[page] = self.pages, None
                self._idle.move_to_end(page, last=False)
                self.has_changed = True

    def has_page(self, block: int) -> bool:
        """Whether what layers with a window wrote for a block is still there."""
        return bool(self.of_block[block] < self.pages)

    def first_seen(self, position: int) -> int:
        """The number, within its sequence, of the first block that a token at `position` sees."""
        return max(0, position - self.window + 1) // self.block_size

    def usable(self, blocks: Items[int]) -> Items[int]:
        """The longest beginning of a sequence's `blocks` after which the next token finds all pages that it sees."""
        most = together = 0  # `together`: how many of the blocks so far have pages, without one missing between them
        for count, block in enumerate(blocks, 1):
            together = together + 1 if self.has_page(block) else 0
            if together >= count - self.first_seen(count * self.block_size):
                most = count
        return blocks[:most]

    def _most(self, sequence: Sequence) -> int:
        """Pages that a sequence holds at most where a step takes no more than a block of its tokens."""
        return min(pages_for(self.window, 1, 0, self.block_size), -(-sequence.longest // self.block_size))

    def _hold(self, block: int) -> None:
        page = int(self.of_block[block])
        if page == self.pages:
            page = self._take(block)
        elif not self._readers[block]:
            del self._idle[page]
        self._readers[block] += 1

    def _release(self, block: int) -> None:
        assert self._readers[block] > 0, f"the page of block {block} released more often than held"
        self._readers[block] -= 1
        if not self._readers[block]:
            self._idle[int(self.of_block[block])] = None

    def _take(self, block: int) -> int:
        page, _ = self._idle.popitem(last=False)
        if (before := self._blocks[page]) is not None:
            self.of_block[before] = self.pages
        self._blocks[page], self.of_block[block] = block, page
        self.has_changed = True
        return page
