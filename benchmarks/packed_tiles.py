"""Microseconds of x · Wᵀ with packed weights by how the product is cut: the rules of kernels/quantized/packed_rows.py
(up to 16 rows) and kernels/quantized/quantized_linear.py (more).

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
import triton
from torch import Tensor

from benchmarks.rows import RESULTS, append_row
from tightfit.kernels.quantized.packed_rows import MOST_ROWS, RowTiles, by_group, launch_packed_rows, row_tiles_for
from tightfit.kernels.quantized.packing import TILE_WORDS
from tightfit.kernels.quantized.quantized_linear import Tiles, launch_some, quantized_linear_eager, tiles_for

BITS, GROUP = 4, 128
SPREAD_BYTES = 400 * 10**6
PRODUCTS, ROUNDS = 12, 5
SHAPES = ("28672x4096", "4096x14336", "6144x4096", "4096x4096")
FIELDS = ("block_m", "block_n", "split", "parts", "stages", "warps")


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


def cuts(rows: int, tiles: int) -> Iterator[Tiles | RowTiles]:
    """Those worth trying; a row of the weight has so many tiles."""
    if rows <= MOST_ROWS:
        for block_n, parts, stages in itertools.product((16, 32, 64), (4, 8, 16), (2, 3, 4)):
            if tiles % parts == 0:
                yield RowTiles(block_n=block_n, parts=parts, stages=stages)
        return
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
    scale = by_group((torch.rand(outputs, inputs // GROUP, device=device) * 0.01 + 0.001).half())
    zero = by_group(torch.randint(0, 2**BITS, scale.shape, device=device, dtype=torch.uint8))
    x = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16)
    truth = quantized_linear_eager(x.double(), packed[0], scale, zero, BITS, GROUP)

    def timed(tiles: Tiles | RowTiles) -> float | None:
        def product(number: int) -> Tensor:
            words = packed[number % copies]
            if isinstance(tiles, RowTiles):
                return launch_packed_rows(x, words, scale, zero, BITS, GROUP, tiles)
            return launch_some(x, words, scale, zero, BITS, GROUP, tiles)

        try:
            wrong = ((product(0).double() - truth).norm() / truth.norm()).item()
        except triton.runtime.errors.OutOfResources:
            return None
        if wrong > 0.01:
            print("wrong by", wrong, tiles)
            return None
        return graph_us(product)

    few = rows <= MOST_ROWS
    own = row_tiles_for(outputs, inputs, BITS) if few else tiles_for(rows, outputs, inputs, BITS, device)
    found = [(us, tiles) for tiles in cuts(rows, words_shape[1] // TILE_WORDS) if (us := timed(tiles)) is not None]
    yield {"cut": "rule", "us": timed(own), **told(own)}
    for place, (us, tiles) in enumerate(sorted(found, key=lambda each: each[0])[:4]):
        yield {"cut": "best" if place == 0 else f"{place + 1}.", "us": us, **told(tiles)}
    wide = [torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) for _ in range(3)]
    yield {
        "cut": "bf16",
        "us": graph_us(lambda number: F.linear(x, wide[number % 3])),
        **dict.fromkeys(FIELDS, ""),
    }


def told(tiles: Tiles | RowTiles) -> dict[str, object]:
    """The fields of a cut, those it has not left empty."""
    return {**dict.fromkeys(FIELDS, ""), **tiles._asdict()}


def main() -> None:
    """Every shape and number of rows asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="outputs x inputs")
    parser.add_argument("--rows", type=int, action="append")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    chosen = parser.parse_args()
    for shape, rows in itertools.product(chosen.shape or SHAPES, chosen.rows or (1, 4, 16, 64, 256)):
        outputs, inputs = map(int, shape.split("x"))
        for row in measure(outputs, inputs, rows):
            told = {"shape": shape, "rows": rows, "bits": BITS, **row}
            print(told, flush=True)
            append_row("packed_tiles", told, folder=chosen.results, commit=chosen.commit)


if __name__ == "__main__":
    main()
