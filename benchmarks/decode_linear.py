"""Bandwidth of decode_linear on the matrices of a decoding step, with different tiles, beside torch's own product.

Weights rotate through more memory than the cache holds, calls are captured as one graph, and rates count the weight's
bytes. Prints the best tiles; kernels/decoding/decode_linear.py has them in `tile_for`.

    python -m benchmarks.decode_linear                (a GPU; two minutes)
    python -m benchmarks.decode_linear --model 8b --overlap
"""

import argparse
import itertools
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tightfit.kernels.decoding.decode_linear import Tile, decode_linear, tile_for

SHAPES = {
    "1b": {
        "qkv": (3072, 2048),
        "o": (2048, 2048),
        "gate_up": (16_384, 2048),
        "down": (2048, 8192),
        "head": (128_256, 2048),
    },
    "8b": {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (28_672, 4096),
        "down": (4096, 14_336),
        "head": (128_256, 4096),
    },
}
ROTATED_BYTES = 400 * 2**20


def microseconds(run: Sequence[Callable[[], Any]]) -> float:
    """The time of one call of those in `run`, captured together; the best of five."""
    for each in run[:2]:
        each()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for each in run:
            each()
    found = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / len(run))
    return min(found)


def tiles() -> list[Tile]:
    """What is tried."""
    sizes = itertools.product((2, 4, 8, 16), (512, 1024, 2048), (4, 8))
    return [Tile(rows, cols, warps) for rows, cols, warps in sizes if rows * cols <= 16_384]


def main() -> None:
    """Time everything and print the best."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=SHAPES, action="append")
    parser.add_argument("--overlap", action="store_true")
    arguments = parser.parse_args()
    for model in arguments.model or list(SHAPES):
        for name, (N, K) in SHAPES[model].items():
            time_one(f"{model} {name}", N, K, arguments.overlap)


def time_one(label: str, N: int, K: int, overlap: bool) -> None:
    """All tiles for one matrix."""
    copies = max(2, min(24, ROTATED_BYTES // (N * K * 2)))
    weights = [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    x, norm = torch.randn(1, K, device="cuda", dtype=torch.bfloat16), weights[0][0].clone()
    settings: dict[str, Any] = {"overlap": overlap}
    if not label.endswith((" o", "down")):
        settings |= {"norm": norm, "norm_eps": 1e-5}
    if label.endswith("gate_up"):
        settings["activation"] = "silu"
    plain = microseconds([partial(F.linear, x, weight) for weight in weights])
    found = []
    for tile in tiles():
        try:
            run = [partial(decode_linear, x, weight, tile=tile, **settings) for weight in weights]
            found.append((microseconds(run), tile))
        except Exception:
            print(f"{tile} failed: {traceback.format_exc(limit=1).splitlines()[-1][:120]}")
    found.sort()
    gated = label.endswith("gate_up")
    chosen = tile_for(N // 2 if gated else N, K, gated=gated)
    ours = next((us for us, tile in found if tile == chosen), 0.0)
    kilobytes = N * K * 2 / 1e3
    best = ", ".join(f"{tuple(tile)} {us:.1f} µs {kilobytes / us:.0f} GB/s" for us, tile in found[:3])
    torch_s = f"torch {plain:.1f} µs {kilobytes / plain:.0f} GB/s"
    print(f"{label} {N}×{K}: {torch_s}; {tuple(chosen)} {ours:.1f} µs; best {best}", flush=True)


if __name__ == "__main__":
    main()
