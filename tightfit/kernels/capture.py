"""Capturing a CUDA graph: torch's, with no garbage collection inside, and with constants that the graph keeps.

A collection may find graphs that nobody needs any more, say those of a model loaded before, in a cycle of references.
CUDA refuses to free a graph while another is captured, and ends that capture.
What the host sends to a kernel that is launched once is sent once to one that is replayed, beside the capture, and
stays in memory with the graph.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

_constants: list[Tensor] | None = None
"""Of the graph that is being captured, whichever thread launches its kernels."""


@contextmanager
def capturing(graph: "torch.cuda.CUDAGraph", **options: Any) -> Iterator[None]:
    """`torch.cuda.graph`, with its options."""
    global _constants
    was_on, outer = gc.isenabled(), _constants
    gc.disable()
    own: list[Tensor] = []
    _constants = own
    try:
        with torch.cuda.graph(graph, **options):
            yield
    finally:
        _constants = outer
        if was_on:
            gc.enable()
    if own:
        torch.cuda.synchronize(own[0].device)
        graph.constants = own  # type: ignore[attr-defined]


def sent(values: Tensor, device: torch.device) -> Tensor:
    """`values` of the host on `device`, without waiting for what that has to do before."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return values.to(device, non_blocking=True)
    assert _constants is not None, "a capture that nobody keeps constants for"
    with torch.cuda.stream(_beside(device)):
        _constants.append(values.to(device, non_blocking=True))
    return _constants[-1]


@cache
def _beside(device: torch.device) -> "torch.cuda.Stream":
    """A stream that is not captured."""
    return torch.cuda.Stream(device)
