"""The key/value cache of one generation: allocated once, filled left to right.

Sliding-window layers keep all positions too; their mask hides those outside the window.
"""

import torch
from torch import Tensor

from tightfit.models.spec import ModelSpec


class KeyValueCache:
    """Keys and values of every layer for up to `capacity` positions of `batch` sequences."""

    def __init__(self, spec: ModelSpec, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (spec.layers, 2, batch, spec.kv_heads, capacity, spec.head_dim)
        self.storage = torch.empty(shape, device=device, dtype=dtype)
        self.capacity, self.length = capacity, 0

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, kv_heads, T, D] of `layer`; returns those of all positions so far."""
        end = self.length + key.shape[2]
        assert end <= self.capacity, f"cache of {self.capacity} positions asked to hold {end}"
        stored = self.storage[layer, :, :, :, :end]
        stored[0, :, :, self.length :] = key
        stored[1, :, :, self.length :] = value
        return stored[0], stored[1]

    def advance(self, count: int) -> None:
        """Count `count` new positions; called after every layer has stored them."""
        self.length += count
