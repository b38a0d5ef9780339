"""How long a step takes, how much memory it needs, and what the machine could do at best.

Launches are hidden the same way for every peer: a spinning kernel keeps the GPU busy while the host queues all rounds,
and events around each round are read afterwards. What is timed is the GPU's work and the gaps between its kernels, not
Python. (A peer that waits for the GPU in the middle of its step cannot be hidden, and is timed as slow as it is.)
Before each round the inputs are restored, because some peers write over them; they are larger than the L2 cache.
A copy writes as much as it reads, and writing is the slower half: an operation that mostly reads can exceed its rate.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Step = Callable[[], object]
GPU_CLOCK_HZ = 2.0e9
"""Rounded up: how fast the spinning kernel counts. It only has to spin long enough."""
LAUNCHES_QUEUED = 1000
"""A CUDA stream holds about 1024 launches; queueing more would wait for the GPU."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one step."""

    p20_ms: float
    p50_ms: float
    p80_ms: float

    @staticmethod
    def of(milliseconds: list[float]) -> "Timing":
        """The 20th, 50th and 80th percentiles."""
        p20, p50, p80 = statistics.quantiles(milliseconds, n=10, method="inclusive")[1:8:3]
        return Timing(p20, p50, p80)


@dataclass(frozen=True)
class Limits:
    """What this machine reaches here and now: bytes read and written by a large copy, and a large matrix product."""

    copy_gb_s: float
    gemm_tflop_s: float

    def ideal_ms(self, bound_by: str, work: float) -> float:
        """The time that `work` bytes or operations take at the limit."""
        return work / (self.copy_gb_s * 1e6) if bound_by == "copy" else work / (self.gemm_tflop_s * 1e9)


def time_step(step: Step, restore: Step, device: torch.device, rounds: int) -> Timing:
    """Time `rounds` rounds of `step`, each after a `restore` that does not count."""
    return Timing.of(_on_gpu(step, restore, rounds) if device.type == "cuda" else _on_cpu(step, restore, rounds))


def _on_gpu(step: Step, restore: Step, rounds: int) -> list[float]:
    torch.cuda.synchronize()
    began = time.perf_counter()
    restore()
    step()
    queueing_s = time.perf_counter() - began
    torch.cuda.synchronize()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    torch.cuda._sleep(int(1.5 * rounds * queueing_s * GPU_CLOCK_HZ))
    for start, end in events:
        restore()
        start.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def _on_cpu(step: Step, restore: Step, rounds: int) -> list[float]:
    milliseconds = []
    for _ in range(rounds):
        restore()
        began = time.perf_counter()
        step()
        milliseconds.append((time.perf_counter() - began) * 1e3)
    return milliseconds


def first_call_s(step: Step, device: torch.device) -> float:
    """Seconds of a first call: importing, compiling and running."""
    _wait(device)
    began = time.perf_counter()
    step()
    _wait(device)
    return time.perf_counter() - began


def extra_bytes(step: Step, device: torch.device) -> int:
    """Memory a step holds at its peak beyond what is there before it (its inputs and the gradients given)."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure_limits(device: torch.device) -> Limits:
    """Copy half a gigabyte and multiply two 8192² matrices (on a CPU, far less)."""
    on_gpu = device.type == "cuda"
    count, side, dtype = (2**28, 8192, torch.bfloat16) if on_gpu else (2**20, 256, torch.float32)
    source, target = torch.randn(count, device=device).to(dtype), torch.empty(count, device=device, dtype=dtype)
    copy = time_step(lambda: target.copy_(source), lambda: None, device, rounds=20)
    moved = 2 * source.numel() * source.element_size()
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    torch.mm(left, right, out=product)
    gemm = time_step(lambda: torch.mm(left, right, out=product), lambda: None, device, rounds=20)
    return Limits(moved / copy.p50_ms / 1e6, 2 * side**3 / gemm.p50_ms / 1e9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
