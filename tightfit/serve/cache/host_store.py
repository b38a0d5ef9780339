"""Keys and values of preempted sequences, kept in host memory until the sequences run again.

The alternative is to compute them again, as happens where the store has no room. Copying 2 · layers · kv_heads · D
numbers a position over the host's link is faster than computing them for long sequences on a GPU, slower for short.
Copies run on the stream of the steps, and so after the steps that wrote what they copy.
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
    """Holds up to `most_bytes` of blocks copied from `cache`."""

    def __init__(self, cache: PagedCache, most_bytes: int) -> None:
        self.cache, self.most_bytes = cache, most_bytes
        self.saved_count = self.restored_count = 0
        self._saved: dict[Sequence, Saved] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes kept now."""
        return sum(each.bytes for each in self._saved.values())

    @torch.inference_mode()
    def save(self, sequence: Sequence) -> None:
        """Copy the blocks of a sequence that is being preempted to the host, if there is room."""
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
        """Copy saved blocks back for a sequence that runs again, except those it found in the prefix cache."""
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
        """Forget a sequence that will not run again."""
        self._saved.pop(sequence, None)
