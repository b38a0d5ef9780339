"""Keys and values of some layers, in blocks."""

from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
from torch import Tensor


class Storage(NamedTuple):
    """Numbers [layers, 2, blocks, block_size, kv_heads, D], or codes with a scale per vector (else `scales` is [0])."""

    numbers: Tensor
    scales: Tensor

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, scaled: bool) -> "Storage":
        """Storage of `shape`; zeros, since a masked NaN stays NaN."""
        scales = torch.zeros(shape[:-1] if scaled else (0,), device=device)
        return cls(torch.zeros(shape, device=device, dtype=dtype), scales)

    @property
    def bytes(self) -> int:
        """Bytes that it takes."""
        return self.numbers.nbytes + self.scales.nbytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.bytes // self.numbers.shape[2]

    def copied(self, blocks: Items[int]) -> "Storage":
        """A copy of `blocks`, in this order, in host memory."""
        index = torch.tensor(blocks, device=self.numbers.device, dtype=torch.int64)
        return Storage(*(part.index_select(2, index).cpu() if part.ndim > 1 else part.cpu() for part in self))

    def paste(self, copied: "Storage", blocks: Items[int]) -> None:
        """Write the last blocks of a copy to `blocks`, as many as these are."""
        index = torch.tensor(blocks, device=self.numbers.device, dtype=torch.int64)
        for part, source in zip(self, copied, strict=True):
            if part.ndim > 1 and len(blocks):
                part.index_copy_(2, index, source[:, :, -len(blocks) :].to(part.device))
