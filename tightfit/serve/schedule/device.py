"""Numbers from the host to where the model is, without waiting for it."""

from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`values` as a tensor on `device`; to a GPU through pinned memory, so that the host does not wait."""
    if device.type != "cuda":
        return torch.tensor(values, device=device, dtype=dtype)
    return torch.as_tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)
