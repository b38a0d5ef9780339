"""Copies numbers from the host to the model's device without waiting for the copy."""

from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`values` as a tensor on `device`; to a GPU through pinned memory, so that the host does not wait."""
    if device.type != "cuda":
        return torch.tensor(values, device=device, dtype=dtype)
    return torch.as_tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)
