"""How long an operation takes on this machine: one of many calls in a row, without the host's launch time.

On a GPU the calls are captured in a CUDA graph and replayed; operations that cannot be captured (a choice of kernels
that looks at the stream) run in a loop. On a CPU a loop of at least `LEAST_S` seconds.
"""

import statistics
import time
from collections.abc import Callable

import torch

from tightfit.kernels.capture import capturing

Do = Callable[[], object]
LEAST_S = 0.015
MOST_CALLS = 50


def timed_ms(do: Do, device: torch.device, *, graph: bool = True) -> float:
    """Milliseconds of one call among many."""
    do()
    once_ms = looped_ms(do, 3 if device.type == "cuda" else 1, device)
    count = max(3, min(MOST_CALLS, int(LEAST_S * 1e3 / max(once_ms, 1e-3))))
    if device.type != "cuda" or not graph:
        return looped_ms(do, count, device)
    captured = torch.cuda.CUDAGraph()
    with capturing(captured):
        for _ in range(count):
            do()
    return statistics.median(looped_ms(captured.replay, 1, device) for _ in range(3)) / count


def looped_ms(do: Do, count: int, device: torch.device) -> float:
    """Milliseconds of one of `count` calls in a row."""
    wait(device)
    began = time.perf_counter()
    for _ in range(count):
        do()
    wait(device)
    return (time.perf_counter() - began) * 1e3 / count


def wait(device: torch.device) -> None:
    """Block until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
