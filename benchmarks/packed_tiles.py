"""Microseconds of x · Wᵀ with packed weights by how the product is cut: the rule of kernels/quantized_linear.py.

Products are replayed as a CUDA graph, each reading another weight than the one before, so that neither launches nor the
L2 cache count. Cuts whose result is off are named, not timed. The best and the rule's own go to
results/packed_tiles.csv beside bf16's product in the same run. A minute on an H200.

    python -m benchmarks.packed_tiles
    python -m benchmarks.packed_tiles --shape 4096x14336 --rows 1
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.rows import RESULTS, append_row
from tightfit.kernels.quantized_linear import Tiles, launch_few, quantized_linear_eager, tiles_for

BITS, GROUP = 4, 128
SPREAD_BYTES = 400 * 10**6
PRODUCTS, ROUNDS = 12, 5
SHAPES = ("28672x4096", "4096x14336", "6144x4096")


def graph_us(product: Callable[[int], Tensor]) -> float:
    """Of one of PRODUCTS products one after the other, the fastest of ROUNDS."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # compiles
        product(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(PRODUCTS):
            product(number)
    graph.replay()
    found = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1e3 * start.elapsed_time(end) / PRODUCTS)
    return min(found)


def cuts(rows: int) -> Iterator[Tiles]:
    """Those worth trying."""
    block_m = min(max(1 << (rows - 1).bit_length(), 16), 128)
    for (block_n, warps), split, stages in itertools.product(((64, 4), (128, 4), (128, 8)), (1, 2, 4, 8, 16), (3, 4)):
        yield Tiles(block_m=block_m, block_n=block_n, split=split, stages=stages, warps=warps)


def measure(outputs: int, inputs: int, rows: int) -> Iterator[dict[str, object]]:
    """The rule's cut, the best one, and bf16."""
    device = torch.device("cuda")
    words_shape = (outputs, inputs * BITS // 32)
    copies = max(2, SPREAD_BYTES * 8 // (outputs * inputs * BITS))
    packed = [
        torch.randint(-(2**31), 2**31 - 1, words_shape, device=device, dtype=torch.int64).to(torch.int32)
        for _ in range(copies)
    ]
    scale = (torch.rand(outputs, inputs // GROUP, device=device) * 0.01 + 0.001).half()
    x = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16)
    truth = quantized_linear_eager(x.double(), packed[0], scale, None, BITS, GROUP)

    def timed(tiles: Tiles) -> float | None:
        def product(number: int) -> Tensor:
            return launch_few(x, packed[number % copies], scale, None, BITS, GROUP, tiles)

        wrong = ((product(0).double() - truth).norm() / truth.norm()).item()
        if wrong > 0.01:
            print("wrong by", wrong, tiles)
            return None
        return graph_us(product)

    own = tiles_for(rows, outputs, inputs, BITS, device)
    found = [(us, tiles) for tiles in cuts(rows) if (us := timed(tiles)) is not None]
    yield {"cut": "rule", "us": timed(own), **own._asdict()}
    best_us, best = min(found)
    yield {"cut": "best", "us": best_us, **best._asdict()}
    wide = [torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) for _ in range(3)]
    yield {
        "cut": "bf16",
        "us": graph_us(lambda number: F.linear(x, wide[number % 3])),
        **dict.fromkeys(Tiles._fields, ""),
    }


def main() -> None:
    """Every shape and number of rows asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="outputs x inputs")
    parser.add_argument("--rows", type=int, action="append")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    chosen = parser.parse_args()
    for shape, rows in itertools.product(chosen.shape or SHAPES, chosen.rows or (1, 16, 64, 256)):
        outputs, inputs = map(int, shape.split("x"))
        for row in measure(outputs, inputs, rows):
            told = {"shape": shape, "rows": rows, "bits": BITS, **row}
            print(told, flush=True)
            append_row("packed_tiles", told, folder=chosen.results, commit=chosen.commit)


if __name__ == "__main__":
    main()
