"""Capturing a CUDA graph: torch's, with no garbage collection inside, and with constants that the graph keeps.

A collection may find graphs that nobody needs any more, say those of a model loaded before, in a cycle of references.
CUDA refuses to free a graph while another is captured, and ends that capture.
What the host sends to a kernel that is launched once is sent once to one that is replayed, beside the capture, and
stays in memory with the graph. A thread that captures may not copy even to another stream, so another thread does.
After a capture that fails, torch takes its generator of random numbers for captured still, and draws no more; it gets
its state of before.
"""

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tightfit.kernels.mapped_copy import sent

_constants: list[Tensor] | None = None
"""Of the graph that is being captured, whichever thread launches its kernels."""


@contextmanager
def capturing(graph: "torch.cuda.CUDAGraph", **options: Any) -> Iterator[None]:
    """`torch.cuda.graph`, with its options."""
    global _constants
    was_on, outer = gc.isenabled(), _constants
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.clone_state()
    gc.disable()
    own: list[Tensor] = []
    _constants = own
    try:
        with torch.cuda.graph(graph, **options):
            yield
    except BaseException:
        generator.graphsafe_set_state(before)
        raise
    finally:
        _constants = outer
        if was_on:
            gc.enable()
    if own:
        graph.constants = own  # type: ignore[attr-defined]


def graph_constant(values: Tensor, device: torch.device) -> Tensor:
    """`values` of the host on `device`; those of a graph are copied beside its capture and kept with it."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return sent(values, device)
    assert _constants is not None, "a capture that nobody keeps constants for"
    with ThreadPoolExecutor(max_workers=1) as beside:
        _constants.append(beside.submit(values.to, device).result())
    return _constants[-1]
