"""What one machine reaches: the few rates and launch times that predicted step times are made of, measured once.

Nothing here is a training step of a real model: products, attention, copies and updates run alone, and what the host
needs to launch layers is the step time of models so narrow that the card waits (calibrate_host.py). So the truth tables
(memory_truth.py) stay a test of the predictions. Takes under a minute on a GPU. Writes
benchmarks/results/calibration.csv, which hardware/efficiency.py cites and tests read.

    python -m benchmarks.calibrate
    python -m benchmarks.calibrate --parts products attention --results DIR

Kernels are timed as they follow each other in a CUDA graph, where the host is not in the way; attention, whose choice
of a backend may look at the stream, in a loop. On a CPU all shapes are tiny, to see that it runs.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.calibrate_families import family_kernels, family_launches
from benchmarks.calibrate_host import launches, link_updates
from benchmarks.rows import RESULTS, append_row
from tightfit.jobs.job import Optimizer
from tightfit.jobs.levers import Levers
from tightfit.kernels.fp8.fp8_matmul import fp8_matmul
from tightfit.kernels.fp8.fp8_quantize import quantize, quantize_columns, quantize_rows
from tightfit.prove import rates, timing
from tightfit.prove.timing import Do
from tightfit.train.optimizer.adamw import MasterAdamW

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SHRINK = 1 if ON_GPU else 64
SHORT = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8"}
WARM_S = 1.0 if ON_GPU else 0.0


@dataclass(frozen=True)
class Found:
    """One measurement: milliseconds, and the operations or bytes that took them."""

    kind: str
    case: str
    dtype: str
    ms: float
    tflop: float = 0.0
    gb: float = 0.0

    def row(self) -> dict[str, str]:
        """As columns of the results."""
        work = {"tflop": f"{self.tflop:.6g}", "gb": f"{self.gb:.6g}"}
        return {"kind": self.kind, "case": self.case, "dtype": self.dtype, "ms": f"{self.ms:.5g}", **work}


def timed_ms(do: Do, *, graph: bool = True) -> float:
    """Of one call among many that follow each other."""
    return timing.timed_ms(do, DEVICE, graph=graph)


def _looped_ms(do: Do, count: int) -> float:
    return timing.looped_ms(do, count, DEVICE)


def _wait() -> None:
    timing.wait(DEVICE)


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def products() -> Iterator[Found]:
    """The three products of a linear layer: y = x Wᵀ, dx = dy W, dW = dyᵀ x; first the card gets warm."""
    x = _random(8192 // SHRINK, 8192 // SHRINK)
    began = time.perf_counter()
    while time.perf_counter() - began < WARM_S:
        _looped_ms(partial(torch.mm, x, x), 20)
    grid = [
        (rows, width, times * width)
        for width in (512, 1024, 2048, 4096)
        for rows in (2048, 8192, 16384)
        for times in (1, 4)
    ]
    for dtype, shapes in ((torch.bfloat16, grid), (torch.float32, [s for s in grid if s[0] == 8192 and s[1] < 4096])):
        if not ON_GPU and dtype != torch.float32:
            continue
        for shape in shapes:
            yield from _three_products(dtype, *(size // SHRINK for size in shape))


def _three_products(dtype: torch.dtype, rows: int, taken: int, made: int) -> Iterator[Found]:
    for each in rates.products(DEVICE, dtype, rows, taken, made):
        yield Found("product", f"{each.name} {rows}x{taken}x{made}", SHORT[dtype], each.ms, each.tflop, each.gb)


def narrow_products() -> Iterator[Found]:
    """Products of 8-bit codes, and the making of codes; bytes are those a kernel that reads once would move."""
    for rows, taken, made in ((8192, 2048, 8192), (8192, 4096, 4096), (8192, 4096, 16384), (16384, 2048, 2048)):
        x, weight = (
            _random(*(n // SHRINK for n in s), dtype=torch.bfloat16 if ON_GPU else torch.float32)
            for s in ((rows, taken), (made, taken))
        )
        (a, _, a_scale), (b, _, b_scale) = quantize(x, transposed=False), quantize(weight, transposed=False)
        work = 2e-12 * rows * taken * made
        for fast in (True, False):
            do = partial(fp8_matmul, a, b, a_scale, b_scale, x.dtype, fast=fast)
            yield Found(
                "product", f"tensor {'fast' if fast else 'wide'} {rows}x{taken}x{made}", "fp8", timed_ms(do), work
            )
        (a, a_scale), (b, b_scale) = quantize_rows(x), quantize_rows(weight)
        do = partial(fp8_matmul, a, b, a_scale, b_scale, x.dtype)
        yield Found("product", f"row fast {rows}x{taken}x{made}", "fp8", timed_ms(do), work)
    for rows, width in ((8192, 4096), (8192, 16384), (2048, 2048)):
        yield from _codes(_random(rows // SHRINK, width // SHRINK, dtype=torch.bfloat16 if ON_GPU else torch.float32))


def _codes(x: Tensor) -> Iterator[Found]:
    amax, numbers = x.abs().amax().float(), x.numel() / 1e9
    ways: dict[str, tuple[Do, int]] = {
        "tensor, both": (partial(quantize, x), 6),
        "tensor, plain": (partial(quantize, x, transposed=False), 5),
        "tensor, both, largest known": (partial(quantize, x, amax=amax), 4),
        "tensor, plain, largest known": (partial(quantize, x, transposed=False, amax=amax), 3),
        "rows": (partial(quantize_rows, x), 3),
        "columns": (partial(quantize_columns, x), 5),
    }
    for name, (do, each) in ways.items():
        yield Found("codes", f"{name} {x.shape[0]}x{x.shape[1]}", "fp8", timed_ms(do), gb=each * numbers)


def attentions() -> Iterator[Found]:
    """Causal attention forward, and backward alone, as the decoder calls it."""
    grid = [
        (torch.bfloat16, rows, length, head)
        for head in (64, 128)
        for rows, length in ((32, 512), (8, 2048), (2, 8192), (1, 32768))
    ]
    grid += [(torch.float32, rows, length, head) for head in (64, 128) for rows, length in ((8, 512), (2, 2048))]
    for dtype, rows, length, head in grid:
        length //= SHRINK
        times = rates.attention_times(DEVICE, dtype if ON_GPU else torch.float32, rows, length, head)
        case = f"{rows}x{length} 16/4x{head}"
        yield Found("attention", f"forward {case}", SHORT[dtype], times.forward_ms, times.tflop)
        yield Found("attention", f"backward {case}", SHORT[dtype], times.backward_ms, 2.5 * times.tflop)


def copies() -> Iterator[Found]:
    """A copy on the card by size, read and written bytes counted."""
    for mib in (1, 4, 16, 64, 256, 1024):
        taken_ms, moved_gb = rates.copy_ms(DEVICE, mib * 2**20 // SHRINK // 4)
        yield Found("copy", f"{mib} MiB", "fp32", taken_ms, gb=moved_gb)


STATES = (
    ("auto", True),
    ("auto", False),
    ("bf16", True),
    ("8bit", True),
    ("8bit", False),
    ("factored", True),
    ("factored", False),
    ("fp32 stochastic", False),
)


def updates() -> Iterator[Found]:
    """AdamW by format of its states, on the card, with float32 masters or without; and what a launch takes the host."""
    for form, masters in STATES:
        for rows, width in ((4096, 14336), (64, 64)) if ON_GPU else ((64, 64),):
            optimizer, factor = _optimizer(form, masters, rows, width)
            gradient = _random(rows, width, dtype=torch.bfloat16 if ON_GPU else torch.float32)

            def do(optimizer: MasterAdamW = optimizer, gradient: Tensor = gradient, factor: Tensor = factor) -> None:
                optimizer.buckets[0].parameters[0].grad = gradient
                optimizer.step(1e-4, factor)

            case = f"{form}{' beside masters' if masters else ''} {rows}x{width}"
            yield Found(
                "update", case, "bf16", timed_ms(do, graph=rows > 64 and form == "factored"), gb=rows * width / 1e9
            )
    narrow = torch.bfloat16 if ON_GPU else torch.float32
    chunks = {rows: _random(rows, 2**22 // SHRINK // SHRINK, dtype=narrow) for rows in (1, 9)}
    taken = {rows: _queued_ms(*_optimizer("factored", True, *each.shape), each) for rows, each in chunks.items()}
    yield Found("host", "factored update, each further chunk", "bf16", (taken[9] - taken[1]) / 8)


def _optimizer(form: str, masters: bool, rows: int, width: int) -> tuple[MasterAdamW, Tensor]:
    narrow = torch.bfloat16 if ON_GPU else torch.float32
    model = nn.Linear(width, rows, bias=False, device=DEVICE, dtype=torch.float32 if masters else narrow)
    states, *rounding = form.split()
    levers = Levers(optimizer_states=states, rounding=rounding[0] if rounding else "nearest")  # type: ignore[arg-type]
    settings = Optimizer(lr=1e-4)
    return MasterAdamW(model, settings, narrow if masters else None, levers), torch.ones((), device=DEVICE)


def _queued_ms(optimizer: MasterAdamW, factor: Tensor, gradient: Tensor) -> float:
    """Until the host has launched an update, however long the card then takes."""
    times = []
    for _ in range(5):
        optimizer.buckets[0].parameters[0].grad = gradient
        _wait()
        began = time.perf_counter()
        optimizer.step(1e-4, factor)
        times.append((time.perf_counter() - began) * 1e3)
    _wait()
    return statistics.median(times)


def link() -> Iterator[Found]:
    """Pinned copies between host and card, each way, both at once, and both beside products; AdamW on the host."""
    buffers = rates.LinkBuffers(DEVICE, 2**27 // SHRINK)
    x = _random(8192 // SHRINK, 8192 // SHRINK, dtype=torch.bfloat16 if ON_GPU else torch.float32)
    multiply = partial(torch.mm, x, x)
    journeys = {
        "in": buffers.ms(into=True),
        "out": buffers.ms(out=True),
        "both": buffers.ms(into=True, out=True),
        "both beside products": buffers.ms(into=True, out=True, beside=multiply),
    }
    for name, taken_ms in journeys.items():
        yield Found("link", name, "fp32", taken_ms, gb=buffers.gb)
    yield Found("host adam", "alone", "fp32", buffers.host_adam_ms(), gb=buffers.host[0].numel() / 1e9)


def host() -> Iterator[Found]:
    """What the host needs to launch a layer, by levers."""
    for case, milliseconds in launches(DEVICE):
        yield Found("host", case, "fp32" if "fp32" in case else "bf16", milliseconds)


def away() -> Iterator[Found]:
    """Updates of states on the host, and layers whose weights come from there; `gb` is a billion weights."""
    for case, milliseconds, weights in link_updates(DEVICE):
        yield Found("away", case, "bf16", milliseconds, gb=weights / 1e9)


def families() -> Iterator[Found]:
    """Kernels that other families' layers are made of."""
    for each in family_kernels(DEVICE):
        yield Found(each.kind, each.case, "bf16", each.ms, each.tflop, each.gb)


def family_host() -> Iterator[Found]:
    """What the host needs to launch other families' layers."""
    for case, milliseconds in family_launches(DEVICE):
        yield Found("host", case, "bf16", milliseconds)


PARTS: dict[str, Callable[[], Iterator[Found]]] = {
    "host": host,
    "products": products,
    "fp8": narrow_products,
    "attention": attentions,
    "copies": copies,
    "updates": updates,
    "link": link,
    "away": away,
    "families": families,
    "family-host": family_host,
}


def main() -> None:
    """Measure the chosen parts and append a row for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    chosen = parser.parse_args()
    for part in chosen.parts:
        began = time.perf_counter()
        for found in PARTS[part]():
            append_row("calibration", found.row(), folder=chosen.results, commit=chosen.commit)
            print(*found.row().values(), sep="\t", flush=True)
        print(f"{part}: {time.perf_counter() - began:.1f} s", flush=True)
        if ON_GPU:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
