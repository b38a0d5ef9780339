"""Keys and values of sequences that had to give way, kept in the host's memory until they run again.

The other way is to compute them again, as the scheduler does where there is no room. Copying 2 · layers · kv_heads ·
D numbers a position over the host's link is faster than computing them for long sequences on a GPU, slower for short.
Copies are ordered after the steps that wrote what they read: they are made on the stream that runs those.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tightfit.serve.cache.paged import PagedCache
from tightfit.serve.schedule.sequence import Sequence


@dataclass
class Saved:
    """The first `stored` positions of a sequence: its blocks one after the other."""

    stored: int
    codes: Tensor
    scales: Tensor | None

    @property
    def bytes(self) -> int:
        """Bytes of host memory that the store takes."""
        parts = [self.codes, *([self.scales] if self.scales is not None else [])]
        return sum(part.numel() * part.element_size() for part in parts)


class HostStore:
    """Up to `most_bytes` of what a cache held."""

    def __init__(self, cache: PagedCache, most_bytes: int) -> None:
        self.cache, self.most_bytes = cache, most_bytes
        self.saved_count = self.restored_count = 0
        self._saved: dict[Sequence, Saved] = {}

    @property
    def used_bytes(self) -> int:
        """What is kept now."""
        return sum(each.bytes for each in self._saved.values())

    @torch.inference_mode()
    def save(self, sequence: Sequence) -> None:
        """Keep what a running sequence has in the cache, if there is room; it is about to lose its blocks."""
        count = -(-sequence.stored // self.cache.block_size)
        per_block = self.cache.bytes // self.cache.storage.shape[2]
        if not count or self.used_bytes + count * per_block > self.most_bytes:
            return
        blocks = torch.tensor(sequence.blocks[:count], device=self.cache.storage.device)
        codes = self.cache.storage.index_select(2, blocks).cpu()
        scales = self.cache.scales.index_select(2, blocks).cpu() if self.cache.is_quantized else None
        self._saved[sequence] = Saved(sequence.stored, codes, scales)
        self.saved_count += 1

    @torch.inference_mode()
    def restore(self, sequence: Sequence) -> None:
        """Fill the blocks of a sequence that runs again, but for the first ones, which it found in the cache."""
        saved = self._saved.pop(sequence, None)
        if saved is None or saved.stored <= sequence.stored:
            return
        known, count = sequence.stored // self.cache.block_size, saved.codes.shape[2]
        device = self.cache.storage.device
        blocks = torch.tensor(sequence.blocks[known:count], device=device)
        self.cache.storage.index_copy_(2, blocks, saved.codes[:, :, known:].to(device))
        if saved.scales is not None:
            self.cache.scales.index_copy_(2, blocks, saved.scales[:, :, known:].to(device))
        sequence.stored = saved.stored
        self.restored_count += 1

    def drop(self, sequence: Sequence) -> None:
        """Nobody wants this sequence any more."""
        self._saved.pop(sequence, None)
