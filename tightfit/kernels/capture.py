"""Capturing a CUDA graph: torch's, with no garbage collection inside.

A collection may find graphs that nobody needs any more, say those of a model loaded before, in a cycle of references.
CUDA refuses to free a graph while another is captured, and ends that capture.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def capturing(graph: "torch.cuda.CUDAGraph", **options: Any) -> Iterator[None]:
    """`torch.cuda.graph`, with its options."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, **options):
            yield
    finally:
        if was_on:
            gc.enable()
