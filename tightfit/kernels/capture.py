"""`torch.cuda.graph` without garbage collection during capture, and with constants that the graph keeps alive.

Garbage collection may free a CUDA graph that is only referenced in a cycle, say that of a model loaded before. CUDA
refuses to free a graph while another is captured, and invalidates that capture.
A tensor that the host sends to a kernel (such as a table of addresses) is copied once, outside the capture, and stays
in memory as long as the graph. The capturing thread may not copy even on another stream, so another thread does.
After a failed capture torch takes its random number generator for still captured and refuses to draw; the generator's
state of before the capture is restored.
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
"""Constants of the graph being captured; global, as any thread may launch its kernels."""


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
    """A copy on `device` of a host tensor; during a capture it is made outside of that and kept with the graph."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return sent(values, device)
    assert _constants is not None, "a capture that was not begun by `capturing`"
    with ThreadPoolExecutor(max_workers=1) as beside:
        _constants.append(beside.submit(values.to, device).result())
    return _constants[-1]
