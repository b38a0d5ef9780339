"""Functions recorded as CUDA graphs: launching a hundred kernels costs as one."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tightfit.kernels.capture import capturing


@dataclass
class Captured:
    """A function without arguments, replayed as a graph where one was captured. Its output is kept for every captured
    size: so a graph of the layers returns states, and the output projection is a graph of its own, whose logits lie in
    memory that all sizes share."""

    run: Callable[[], Tensor]
    graph: "torch.cuda.CUDAGraph | None" = None
    output: Tensor | None = None

    def __call__(self) -> Tensor:
        if self.graph is None:
            return self.run()
        self.graph.replay()
        assert self.output is not None
        return self.output


class Recorder:
    """Captures graphs that run one after the other, and so share memory. On a CPU nothing is captured."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    @torch.inference_mode()
    def record(self, run: Callable[[], Tensor]) -> Captured:
        """`run` captured as a graph, after a run outside of it: first calls compile kernels and set up libraries."""
        if self.device.type != "cuda":
            return Captured(run)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, pool=self._pool):
            output = run()
        return Captured(run, graph, output)
