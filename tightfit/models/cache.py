"""The key/value cache of one generation: preallocated, filled left to right.

Every layer keeps all positions, windowed layers too (their mask hides the rest): simple, and right for any pattern.
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
        """Store the new positions of `layer` and return all of them so far."""
        end = self.length + key.shape[2]
        assert end <= self.capacity, f"cache of {self.capacity} positions asked to hold {end}"
        slots = self.storage[layer, :, :, :, :end]
        slots[0, :, :, self.length :] = key
        slots[1, :, :, self.length :] = value
        return slots[0], slots[1]

    def advance(self, count: int) -> None:
        """Called once every layer has stored `count` new positions."""
        self.length += count
