"""Host memory that a GPU copies to and from: pinned, so that copies run beside kernels, and seen by simulations."""

import torch
from torch import Tensor


def host_empty(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory on the host for what lives on `device` otherwise."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
