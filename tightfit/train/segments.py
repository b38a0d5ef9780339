"""Turns on expandable segments of torch's CUDA allocator where policy/segments.py says so."""

import os
from typing import Any

import torch

from tightfit.jobs.layout import Layout
from tightfit.levers.policy.segments import SETTING, VARIABLES, uses_expandable_segments


def use_expandable_segments(layout: Layout, device: torch.device) -> None:
    """Call this before the process allocates on `device`; allocator settings in the environment go first."""
    if device.type != "cuda" or not uses_expandable_segments(layout) or any(os.environ.get(name) for name in VARIABLES):
        return
    allocators: Any = torch._C
    allocators._accelerator_setAllocatorSettings(SETTING)
