"""The most memory that a run has taken so far."""

import torch

from tightfit.hardware.cpu import peak_resident_bytes


def peak_memory_bytes(device: torch.device) -> int:
    """Peak of allocated GPU memory, or of the process's resident memory on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()


def forget_peak_memory(device: torch.device) -> None:
    """Let a GPU's peak count from here on: this process may have trained before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
