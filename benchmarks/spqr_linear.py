"""Milliseconds of x · Wᵀ with an SpQR weight beside expanding it with torch, expanding it by kernels, and bf16.

In CUDA graphs; weights rotate through more memory than the L2 cache holds, as in a model. `bytes` are those of the
weight as it is held, `read_gb_s` what it is read at. Outliers are a random 1 % of the weights, and codes random: only
their places and bytes matter here. Appends to benchmarks/results/spqr_linear.csv; a minute on an H200.

    python -m benchmarks.spqr_linear
    python -m benchmarks.spqr_linear --tiny --device cpu      # checks that everything runs
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.quantized_linear import milliseconds
from benchmarks.rows import RESULTS, append_row
from tightfit.kernels.quantized.packed_rows import MOST_ROWS
from tightfit.kernels.quantized.spqr_layout import SpqrTensors, arrange_codes, arrange_statistics
from tightfit.kernels.quantized.spqr_linear import (
    SpqrTiles,
    expanded_spqr,
    expanded_spqr_eager,
    launch_spqr_rows,
    spqr_linear,
)

Set = tuple[SpqrTensors, Tensor]
"""A weight and the matrix that it is."""
Way = Callable[[Tensor, SpqrTensors, Tensor], Tensor]

SHAPES = ((4096, 14336), (14336, 4096))
"""Inputs and outputs."""
ROWS = (1, 4, 16, 64, 2048)
SPREAD_BYTES = 256 * 2**20
CUTS = tuple(
    SpqrTiles(block_n=block_n, parts=parts, stages=stages)
    for block_n, parts, stages in ((16, 8, 1), (16, 8, 2), (32, 8, 1), (16, 4, 1), (32, 4, 1), (16, 16, 1))
)


def random_weight(outputs: int, inputs: int, bits: int, share: float, device: torch.device) -> SpqrTensors:
    """Random codes, scales about 0.02 · 2^−bits, and outliers a share of the weights, a tenth large."""
    groups = inputs // 16
    codes = torch.randint(0, 2**bits, (outputs, inputs), device=device, dtype=torch.uint8)
    statistics = torch.randint(0, 8, (2, outputs, groups), device=device, dtype=torch.uint8)
    ranges = torch.rand(outputs // 16, groups, 4, device=device) + 0.5
    ranges *= torch.tensor([0.005 * 2.0**-bits, 0.02 * 2.0**-bits, 0.03 * 2**bits, 0.3 * 2**bits], device=device)
    is_outlier = torch.rand(outputs, inputs, device=device) < share
    starts = torch.zeros(outputs + 1, device=device, dtype=torch.int32)
    starts[1:] = is_outlier.sum(1).cumsum(0)
    columns = is_outlier.nonzero()[:, 1].to(torch.uint16)
    values = (torch.randn(len(columns), device=device) * 0.1).half()
    made = SpqrTensors(
        arrange_codes(codes, bits), arrange_statistics(*statistics), ranges.half(), starts, columns, values, values
    )
    none = made._replace(starts=torch.zeros_like(starts), columns=columns[:0], values=values[:0])
    coded = expanded_spqr_eager(none, torch.float32)
    return made._replace(changes=(values.float() - coded[is_outlier]).half())


def ways(rows: int, *, cuts: bool) -> dict[str, Way]:
    """Ways to multiply so many rows, by name."""
    made: dict[str, Way] = {
        "bf16": lambda x, weight, matrix: F.linear(x, matrix),
        "spqr": lambda x, weight, matrix: spqr_linear(x, weight),
        "expanded by torch": lambda x, weight, matrix: F.linear(x, expanded_spqr_eager(weight, x.dtype)),
        "expanded by kernels": lambda x, weight, matrix: F.linear(x, expanded_spqr(weight, x.dtype)),
    }
    if cuts and rows <= MOST_ROWS:
        made |= {" ".join(f"{name} {size}" for name, size in cut._asdict().items()): _cut(cut) for cut in CUTS}
    return made


def _cut(cut: SpqrTiles) -> Way:
    return lambda x, weight, matrix: launch_spqr_rows(x, weight, cut)


def measured(name: str, way: Way, sets: list[Set], x: Tensor, rounds: int) -> dict[str, Any]:
    """A row of the table: a way to multiply by all weights in turn."""
    weight, matrix = sets[0]
    wanted, made = x.double() @ expanded_spqr_eager(weight, torch.float64).T, way(x, weight, matrix)
    took = milliseconds([partial(_called, way, each) for each in sets], x, rounds)
    held = matrix.nbytes if name == "bf16" else sum(tensor.nbytes for tensor in weight)
    return {
        "rows": len(x),
        "inputs": matrix.shape[1],
        "outputs": matrix.shape[0],
        "bits": weight.bits,
        "outliers": round(len(weight.columns) / matrix.numel(), 4),
        "way": name,
        "ms": round(took, 5),
        "weight_mb": round(held / 1e6, 2),
        "read_gb_s": round(held / took / 1e6, 1),
        "relative_error": f"{float((made - wanted).norm() / wanted.norm()):.2e}",
    }


def _called(way: Way, given: Set, x: Tensor) -> Tensor:
    return way(x, *given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small shapes, nothing recorded")
    parser.add_argument("--cuts", action="store_true", help="also every cut of the kernel of few rows")
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.01, help="of weights that are outliers")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    for inputs, outputs in ((256, 64),) if arguments.tiny else SHAPES:
        count = 2 if arguments.tiny else SPREAD_BYTES * 8 // (inputs * outputs * arguments.bits) + 1
        weights = [random_weight(outputs, inputs, arguments.bits, arguments.share, device) for _ in range(count)]
        sets = [(weight, expanded_spqr_eager(weight, dtype)) for weight in weights]
        for rows in arguments.rows[:2] if arguments.tiny else arguments.rows:
            x = torch.randn(rows, inputs, device=device, dtype=dtype)
            for name, way in ways(rows, cuts=arguments.cuts).items():
                row = measured(name, way, sets, x, arguments.rounds)
                print(row, flush=True)
                if not arguments.tiny:
                    append_row("spqr_linear", row, folder=arguments.results, commit=arguments.commit)


if __name__ == "__main__":
    main()
