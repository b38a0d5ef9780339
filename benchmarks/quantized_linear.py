"""Milliseconds of x · Wᵀ with packed weights beside bf16, torch's int4 and other packages that are installed.

Every call reads other memory than the one before (weights rotate through more than the L2 cache holds), as in a model.
`copy_gb_s` is the copy bandwidth measured in the same run, `read_gb_s` what the weight alone is read at. Appends to
benchmarks/results/quantized_linear.csv. On an H200 about a minute, mostly for compiling, which one process for each row
count does faster (`--rows 1 --rounds 1 --results elsewhere` and so on, before). Ours are measured before others are
made: nothing that those do can take these rows away.
Rows of commits 81fad7a and e182d67 timed the host, call by call (docs/LOG.md); those of fcdbbb90 and later are replayed
graphs and count.

    python -m benchmarks.quantized_linear
    python -m benchmarks.quantized_linear --tiny --device cpu      # checks that everything runs
"""

import argparse
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.quantized_peers import COMPILED, COMPILED_ROWS, Made, Product, peers, told
from benchmarks.rows import RESULTS, append_row
from tightfit.kernels.fp8.fp8_quantize import quantize_rows
from tightfit.kernels.quantized.packed_rows import by_group
from tightfit.kernels.quantized.packing import pack_tiles
from tightfit.kernels.quantized.quantized_linear import expanded_eager, quantized_linear
from tightfit.kernels.quantized.rounded_linear import NEEDED, rounded_linear
from tightfit.models.quantized.ranges import fit_grid
from tightfit.models.quantized.scheme import Scheme

ROWS = (1, 4, 16, 64, 128, 256, 2048)
SHAPES = ((4096, 14336), (14336, 4096))
"""Inputs and outputs: up and down in the layers of Llama-3.1-8B."""
TINY = ((128, 256), (256, 128))
GROUP = 128
SPREAD_BYTES = 256 * 2**20
"""Weights in rotation together: several times the L2 cache."""
TURNS = 4
MOST_SECONDS = 0.5
"""Of one median, where calls are slow."""


def coded(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor | None]:
    """Words, scales and zero points of a matrix rounded to nearest, as a server holds them."""
    made = fit_grid(weight.float(), scheme).code(weight.float())
    zero = None if made.zero is None else by_group(made.zero.to(torch.uint8))
    return pack_tiles(made.codes, scheme.bits), by_group(made.scale.to(torch.float16)), zero


def products(weight: Tensor, group: int) -> dict[str, Made]:
    """Implementations, each with the bytes of its weight."""
    made: dict[str, Made] = {"bf16": (lambda x: F.linear(x, weight), weight.nbytes)}
    for bits, span in ((4, group), (8, group), (8, 0)):
        scheme = Scheme(bits=bits, group=span, symmetric=span == 0)
        words, scale, zero = coded(weight, scheme)
        held = words.nbytes + scale.nbytes + (0 if zero is None else zero.nbytes)
        name = f"w{bits}a16 " + (f"g{span}" if span else "per channel")
        made[name] = (_packed(words, scale, zero, bits, span), held)
    codes = fit_grid(weight.float(), Scheme(bits=8, group=0)).code(weight.float())
    signed = (codes.codes.to(torch.int16) - 128).to(torch.int8)
    made["w8a8 int8"] = (lambda x: rounded_linear(x, signed, codes.scale), signed.nbytes)
    if not weight.is_cuda or torch.cuda.get_device_capability() >= NEEDED[torch.float8_e4m3fn]:
        eights, eight_scale = quantize_rows(weight)
        made["w8a8 fp8"] = (lambda x: rounded_linear(x, eights, eight_scale), eights.nbytes)
    if weight.is_cuda:
        made["torch int4 g128"] = _torch_int4(weight)
    return made


def _packed(words: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group: int) -> Product:
    return lambda x: quantized_linear(x, words, scale, zero, bits, group)


def _torch_int4(weight: Tensor) -> Made:
    """torch's tinygemm: asymmetric int4 in groups of 128, bf16 scales and zero points."""
    words, scale, zero = coded(weight, Scheme(bits=4, group=128, symmetric=False))
    codes = (
        expanded_eager(words, torch.ones_like(scale), torch.zeros_like(scale), 4, weight.shape[1], torch.float32)
    ).to(torch.int32)
    halves = ((codes[:, ::2] << 4) | codes[:, 1::2]).to(torch.uint8)
    packed = torch._convert_weight_to_int4pack(halves, 8)
    assert zero is not None
    shifted = (8 - zero.float()) * scale.float()  # theirs is (q − 8) · s + z
    both = torch.stack([scale.float(), shifted], -1).transpose(0, 1).contiguous().to(torch.bfloat16)
    return (lambda x: torch._weight_int4pack_mm(x, packed, 128, both)), packed.nbytes + both.nbytes


def milliseconds(calls: list[Product], x: Tensor, rounds: int) -> float:
    """Median time of a call, over weights in rotation; on a GPU in a CUDA graph, as an engine decodes."""
    for call in calls:
        call(x)
    if not x.is_cuda:
        began = perf_counter()
        calls[0](x)
        return (perf_counter() - began) * 1e3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls * TURNS:
            call(x)
    found: list[float] = []
    while len(found) < rounds and sum(found) * len(calls) * TURNS < 1e3 * MOST_SECONDS:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        found.append(start.elapsed_time(stop) / len(calls) / TURNS)
    return median(found)


def copy_gb_s(device: torch.device) -> float:
    """Bytes read and written a second by a large copy."""
    source = torch.empty(2**28 if device.type == "cuda" else 2**16, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds([lambda x: target.copy_(source)], source, 20) / 1e6


class Bench:
    """Products of the weights of all shapes on one device, and where the rows go."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.device = arguments, torch.device(arguments.device)
        self.began = perf_counter()
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.copy_gb_s = copy_gb_s(self.device)
        self.rows = arguments.rows or (ROWS[:3] if arguments.tiny else ROWS)
        torch.manual_seed(0)
        self.weights = {shape: self._weights(*shape) for shape in (TINY if arguments.tiny else SHAPES)}
        self.found: dict[tuple[int, int], dict[str, dict[int, float]]] = {shape: {} for shape in self.weights}

    def _weights(self, inputs: int, outputs: int) -> list[Tensor]:
        """As many as do not fit into the cache, also in 4 bits."""
        count = 2 if self.arguments.tiny else max(SPREAD_BYTES // (inputs * outputs // 2), 2)
        return [torch.randn(outputs, inputs, device=self.device, dtype=self.dtype) * 0.02 for _ in range(count)]

    def own(self) -> None:
        """Ours and torch's."""
        for shape, weights in self.weights.items():
            made = [products(weight, GROUP) for weight in weights]
            for name in made[0]:
                for rows in self.rows:
                    self.measure(name, shape, rows, [each[name] for each in made])

    def others(self) -> None:
        """Those of other packages, one after the other; what compiles for seconds at fewer numbers of rows."""
        for name, make in peers(GROUP):
            chosen = [rows for rows in self.rows if COMPILED not in name or rows in COMPILED_ROWS]
            for shape, weights in self.weights.items():
                made: list[Made] = []
                with told(f"{name} refuses {shape[0]} x {shape[1]}"):
                    made = [make(weight, GROUP) for weight in weights]
                for rows in chosen if made else ():
                    with told(f"{name} refuses {rows} x {shape[0]} x {shape[1]}"):
                        self.measure(name, shape, rows, made)

    def measure(self, name: str, shape: tuple[int, int], rows: int, made: list[Made]) -> None:
        """One row of the table, unless time is up."""
        if perf_counter() - self.began > self.arguments.budget:
            print(f"{name}, {rows} x {shape[0]} x {shape[1]} is passed over: no time is left", flush=True)
            return
        torch.manual_seed(rows)
        x = torch.randn(rows, shape[0], device=self.device, dtype=self.dtype)
        row = measured(name, made, x, F.linear(x, self.weights[shape][0]).float(), self.arguments.rounds)
        row["copy_gb_s"] = round(self.copy_gb_s, 1)
        self.found[shape].setdefault(name, {})[rows] = row["ms"]
        print(*(row[key] for key in ("shape", "implementation", "ms", "read_gb_s", "relative_error")), flush=True)
        if not self.arguments.tiny:
            append_row("quantized_linear", row, folder=self.arguments.results, commit=self.arguments.commit)

    def show(self) -> None:
        """Microseconds, a line a product and a column a number of rows."""
        for (inputs, outputs), found in self.found.items():
            print(f"\n{f'us, rows x {inputs} x {outputs}':50}", *(f"{rows:8}" for rows in self.rows))
            for name, taken in found.items():
                cells = (f"{taken[rows] * 1e3:8.1f}" if rows in taken else " " * 8 for rows in self.rows)
                print(f"{name:50}", *cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small shapes, nothing recorded")
    parser.add_argument("--rows", type=int, action="append", help="these numbers of rows alone")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--budget", type=float, default=600.0, help="seconds after which nothing further is measured")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    with torch.no_grad():
        bench = Bench(parser.parse_args())
        try:
            bench.own()
            bench.others()
        finally:
            bench.show()


def measured(name: str, sets: list[Made], x: Tensor, wanted: Tensor, rounds: int) -> dict[str, Any]:
    """A row of the table, of the products of that name by all weights in turn."""
    (rows, inputs), outputs = x.shape, wanted.shape[1]
    call, held = sets[0]
    error = float((call(x).float() - wanted).norm() / wanted.norm())
    took = milliseconds([call for call, _ in sets], x, rounds)
    return {
        "shape": f"{rows} x {inputs} x {outputs}",
        "rows": rows,
        "implementation": name,
        "ms": round(took, 5),
        "weight_mb": round(held / 1e6, 2),
        "read_gb_s": round(held / took / 1e6, 1),
        "copy_gb_s": "",
        "tflop_s": round(2e-9 * rows * inputs * outputs / took, 2),
        "relative_error": round(error, 5),
    }


if __name__ == "__main__":
    main()
