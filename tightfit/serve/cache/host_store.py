"""Keys and values of preempted sequences, kept in host memory until the sequences run again.

The alternative is to compute them again, as happens where the store has no room. Copying 2 · layers · kv_heads · D
numbers a position over the host's link is faster than computing them for long sequences on a GPU, slower for short.
Copies run on the stream of the steps, and so after the steps that wrote what they copy.
"""

from dataclasses import dataclass

import torch

from tightfit.serve.cache.paged import PagedCache
from tightfit.serve.cache.storage import Storage
from tightfit.serve.schedule.sequence import Sequence
from tightfit.serve.schedule.window_pages import WindowPages


@dataclass
class Saved:
    """The first `stored` positions of a sequence: its blocks one after the other, and the pages of the last of them."""

    stored: int
    blocks: Storage
    pages: Storage | None

    @property
    def bytes(self) -> int:
        """Bytes of host memory that the store takes."""
        return self.blocks.bytes + (0 if self.pages is None else self.pages.bytes)


class HostStore:
    """Holds up to `most_bytes` of blocks copied from `cache`, and of the pages that `windows` gave them."""

    def __init__(self, cache: PagedCache, most_bytes: int, windows: WindowPages | None = None) -> None:
        self.cache, self.most_bytes, self.windows = cache, most_bytes, windows
        self.saved_count = self.restored_count = 0
        self._saved: dict[Sequence, Saved] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes kept now."""
        return sum(each.bytes for each in self._saved.values())

    @torch.inference_mode()
    def save(self, sequence: Sequence) -> None:
        """Copy the blocks of a sequence that is being preempted to the host, if there is room."""
        blocks, pages = self._blocks(sequence), self._pages(sequence)
        needed_bytes = len(blocks) * self.cache.whole.block_bytes
        if self.cache.windowed is not None:
            needed_bytes += len(pages) * self.cache.windowed.block_bytes
        if not blocks or self.used_bytes + needed_bytes > self.most_bytes:
            return
        windowed = None if self.cache.windowed is None else self.cache.windowed.copied(pages)
        self._saved[sequence] = Saved(sequence.stored, self.cache.whole.copied(blocks), windowed)
        self.saved_count += 1

    @torch.inference_mode()
    def restore(self, sequence: Sequence) -> None:
        """Copy saved blocks back for a sequence that runs again, except those it found in the prefix cache."""
        saved = self._saved.pop(sequence, None)
        if saved is None or saved.stored <= sequence.stored:
            return
        found = sequence.stored // self.cache.block_size
        sequence.stored = saved.stored
        self.cache.whole.paste(saved.blocks, self._blocks(sequence)[found:])
        if saved.pages is not None and self.windows is not None and self.cache.windowed is not None:
            self.windows.move(sequence, sequence.stored, sequence.stored)
            self.cache.windowed.paste(saved.pages, self._pages(sequence, found))
        self.restored_count += 1

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that will not run again."""
        self._saved.pop(sequence, None)

    def _blocks(self, sequence: Sequence) -> list[int]:
        """The blocks of all stored positions."""
        return sequence.blocks[: -(-sequence.stored // self.cache.block_size)]

    def _pages(self, sequence: Sequence, found: int = 0) -> list[int]:
        """The pages of those that the next token sees in layers with a window, but for the first `found` blocks."""
        if self.windows is None:
            return []
        first = max(found, self.windows.first_seen(sequence.stored))
        return [int(self.windows.of_block[block]) for block in self._blocks(sequence)[first:]]
