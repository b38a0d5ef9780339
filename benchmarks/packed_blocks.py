"""Microseconds of 4-bit products of 16 to 256 rows by how kernels/packed_blocks.py cuts them, beside bf16.

Every call reads another weight than the one before, more of them than the L2 cache holds, in a replayed CUDA graph
(`milliseconds` of benchmarks/quantized_linear.py). Cuts are compiled by several processes first. A cut that is further
from float64 than eager is in 16 bits, or gives other bits the second time, is named and has no time. `bound_us` is what
reading the codes, scales and zero points alone takes at the copy rate of the same run. Appends to
results/packed_blocks.csv; a minute and a half on an H200.

    python -m benchmarks.packed_blocks
    python -m benchmarks.packed_blocks --rows 64 --rounds 50
"""

import argparse
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.quantized_linear import SHAPES, copy_gb_s, milliseconds
from benchmarks.quantized_peers import Product
from benchmarks.rows import RESULTS, append_row
from tightfit.kernels.packed_blocks import TILE, Blocks, Scaled, blocks_for, launch_blocks
from tightfit.kernels.packed_rows import by_group, launch_packed_rows, row_tiles_for
from tightfit.kernels.quantized_linear import expanded, launch_some, quantized_linear_eager, tiles_for

BITS, GROUP = 4, 128
SPREAD_BYTES = 256 * 2**20
ROWS = (16, 32, 64, 128, 256)
PROGRAMS = (90, 420)
"""Fewer leave a third of the processors idle, more give each too little."""
LEAST_TILES = 4
FIELDS = ("block_m", "block_n", "split", "stages", "warps", "scaled")


class Cut(NamedTuple):
    """A kernel to be compiled: `Blocks` but for the split, and whether it begins before its predecessor ends."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    scaled: Scaled
    overlap: bool = False

    def blocks(self, split: int) -> Blocks:
        return Blocks(self.block_m, self.block_n, split, self.stages, self.warps, self.scaled)


CUTS: dict[int, tuple[Cut, ...]] = {
    16: (
        Cut(16, 128, 4, 4, "sums"),
        Cut(16, 128, 4, 6, "sums"),
        Cut(16, 128, 8, 4, "sums"),
        Cut(16, 64, 4, 6, "sums"),
        Cut(16, 128, 4, 4, "weights"),
        Cut(16, 128, 4, 4, "sums", overlap=True),
    ),
    32: (
        Cut(32, 128, 4, 4, "sums"),
        Cut(32, 128, 8, 4, "sums"),
        Cut(32, 64, 4, 6, "sums"),
        Cut(32, 128, 8, 4, "weights"),
    ),
    64: (
        Cut(64, 128, 8, 4, "sums"),
        Cut(64, 128, 8, 3, "sums"),
        Cut(64, 128, 4, 4, "sums"),
        Cut(64, 128, 8, 4, "weights"),
        Cut(64, 128, 8, 4, "halves"),
        Cut(64, 64, 4, 4, "sums"),
        Cut(64, 256, 8, 4, "sums"),
        Cut(64, 128, 8, 4, "sums", overlap=True),
    ),
    128: (
        Cut(128, 128, 8, 3, "sums"),
        Cut(128, 128, 8, 2, "sums"),
        Cut(128, 128, 8, 3, "weights"),
        Cut(128, 128, 8, 3, "halves"),
        Cut(128, 128, 4, 2, "halves"),
        Cut(128, 256, 8, 3, "weights"),
        Cut(128, 256, 16, 3, "weights"),
        Cut(64, 128, 8, 4, "sums"),
    ),
    256: (
        Cut(256, 128, 8, 3, "weights"),
        Cut(256, 128, 8, 3, "halves"),
        Cut(128, 256, 8, 3, "weights"),
        Cut(128, 256, 8, 3, "halves"),
        Cut(128, 256, 16, 3, "weights"),
        Cut(128, 128, 8, 2, "sums"),
        Cut(128, 128, 8, 2, "weights"),
        Cut(256, 128, 8, 3, "weights", overlap=True),
    ),
}


class Coded(NamedTuple):
    """A weight [N, K]."""

    words: Tensor
    scale: Tensor
    zero: Tensor


def coded(outputs: int, inputs: int) -> Coded:
    """Codes, scales and zero points at random."""
    words = torch.randint(-(2**31), 2**31 - 1, (outputs, inputs * BITS // 32), device="cuda", dtype=torch.int64)
    scale = (torch.rand(outputs, inputs // GROUP, device="cuda") * 0.01 + 0.001).half()
    zero = torch.randint(0, 2**BITS, scale.shape, device="cuda", dtype=torch.uint8)
    return Coded(words.to(torch.int32), by_group(scale), by_group(zero))


def splits(cut: Cut, rows: int, outputs: int, inputs: int) -> Iterator[int]:
    """Shares of the inputs that give a sensible number of programs."""
    programs = -(-rows // cut.block_m) * -(-outputs // cut.block_n)
    for split in (1, 2, 3, 4, 6, 8):
        if PROGRAMS[0] <= programs * split <= PROGRAMS[1] and inputs // TILE // split >= LEAST_TILES:
            yield split


def compile_cut(cut: Cut, is_shared: bool) -> float:
    """Seconds that it took; compiled kernels stay in Triton's cache."""
    began = perf_counter()
    x = torch.zeros(cut.block_m, SHAPES[0][0], device="cuda", dtype=torch.bfloat16)
    try:
        launch_blocks(x, *coded(256, SHAPES[0][0]), GROUP, cut.blocks(2 if is_shared else 1), cut.overlap)
    except OutOfResources as error:
        print(cut, error, flush=True)
    torch.cuda.synchronize()
    return perf_counter() - began


def compile_all(rows: list[int], workers: int) -> None:
    """Every kernel that will be timed, in processes of their own."""
    wanted = {
        (cut, split > 1)
        for count in rows
        for cut in CUTS[count]
        for inputs, outputs in SHAPES
        for split in splits(cut, count, outputs, inputs)
    }
    began = perf_counter()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        took = list(pool.map(compile_cut, *zip(*sorted(wanted), strict=True)))
    print(f"{len(took)} kernels, {perf_counter() - began:.1f} s, the slowest {max(took):.1f} s", flush=True)


def one_before(x: Tensor, weight: Coded) -> Tensor:
    """What quantized_linear does on other cards."""
    outputs, inputs = len(weight.words), x.shape[1]
    if len(x) <= 16:
        return launch_packed_rows(x, *weight, BITS, GROUP, row_tiles_for(outputs, inputs, BITS))
    if len(x) <= 128:
        return launch_some(x, *weight, BITS, GROUP, tiles_for(len(x), outputs, inputs, BITS, x.device))
    return F.linear(x, expanded(*weight, BITS, inputs, GROUP, x.dtype))


class Table:
    """Products of one shape, and where their rows go."""

    def __init__(self, inputs: int, outputs: int, arguments: argparse.Namespace) -> None:
        self.inputs, self.outputs, self.arguments = inputs, outputs, arguments
        count = max(SPREAD_BYTES * 8 // (inputs * outputs * BITS), 2)
        self.coded = [coded(outputs, inputs) for _ in range(count)]
        self.wide = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(count)]
        held_bytes = sum(tensor.nbytes for tensor in self.coded[0])
        self.bound_us = round(held_bytes / arguments.copy_gb_s / 1e3, 2)

    def measure(self, rows: int) -> None:
        """All cuts of that many rows, the fastest first when printed."""
        x = torch.randn(rows, self.inputs, device="cuda", dtype=torch.bfloat16)
        truth = quantized_linear_eager(x.double(), *self.coded[0], BITS, GROUP)
        eager = _error(quantized_linear_eager(x, *self.coded[0], BITS, GROUP), truth)
        bf16_us = self.timed([partial(F.linear, weight=w) for w in self.wide], x)
        made: list[dict[str, Any]] = [{"kernel": "bf16", "us": bf16_us, "error": "", **dict.fromkeys(FIELDS, "")}]
        calls: list[Product] = [partial(one_before, weight=w) for w in self.coded]
        took = self.timed(calls, x)
        made.append(
            {"kernel": "other cards'", "us": took, "error": _error(calls[0](x), truth), **dict.fromkeys(FIELDS, "")}
        )
        rule = blocks_for(rows, self.outputs, self.inputs, x.device)
        for cut in CUTS[rows]:
            for split in splits(cut, rows, self.outputs, self.inputs):
                made.append(self.row(x, cut, split, truth, eager, rule))
        print(f"\n{rows} x {self.inputs} x {self.outputs}: bound {self.bound_us:.1f} us, eager's error {eager:.5f}")
        for row in sorted(made, key=lambda row: float(row["us"] or "inf")):
            print(*(f"{row[name]!s:>12.12}" for name in ("kernel", "us", "error", *FIELDS)), flush=True)
            told = {"rows": rows, "inputs": self.inputs, "outputs": self.outputs, **row}
            told |= {"bf16_us": bf16_us, "bound_us": self.bound_us, "eager_error": eager}
            append_row("packed_blocks", told, folder=self.arguments.results, commit=self.arguments.commit)

    def timed(self, calls: list[Product], x: Tensor) -> float:
        """Microseconds of one."""
        return round(1e3 * milliseconds(calls, x, self.arguments.rounds), 2)

    def row(self, x: Tensor, cut: Cut, split: int, truth: Tensor, eager: float, rule: Blocks) -> dict[str, Any]:
        """One cut's row; without a time where it is wrong or does not fit."""
        blocks = cut.blocks(split)
        kernel = ("rule" if blocks == rule else "blocks") + (" overlap" if cut.overlap else "")
        told: dict[str, Any] = {"kernel": kernel, "us": "", "error": "", **blocks._asdict()}
        calls: list[Product] = [partial(_product, weight=w, blocks=blocks, overlap=cut.overlap) for w in self.coded]
        try:
            found = calls[0](x)
        except OutOfResources:
            return told
        told["error"] = _error(found, truth)
        took = self.timed(calls, x)
        if not torch.equal(found, calls[0](x)):
            print("other bits the second time:", cut, split, flush=True)
        elif told["error"] > (1.1 if cut.scaled != "halves" else 1.5) * eager + 1e-5:
            print("wrong by", told["error"], cut, split, flush=True)
        else:
            told["us"] = took
        return told


def _product(x: Tensor, weight: Coded, blocks: Blocks, overlap: bool) -> Tensor:
    return launch_blocks(x, *weight, GROUP, blocks, overlap)


def _error(found: Tensor, truth: Tensor) -> float:
    return round(float((found.double() - truth).norm() / truth.norm()), 6)


def main() -> None:
    """Every number of rows and both shapes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, action="append", choices=ROWS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--budget", type=float, default=100.0, help="seconds after which nothing further is measured")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    arguments = parser.parse_args()
    began, rows = perf_counter(), arguments.rows or list(ROWS)
    compile_all(rows, arguments.workers)
    arguments.copy_gb_s = copy_gb_s(torch.device("cuda"))
    for inputs, outputs in SHAPES:
        table = Table(inputs, outputs, arguments)
        for count in rows:
            if perf_counter() - began > arguments.budget:
                print(f"{count} x {inputs} x {outputs} is passed over: no time is left", flush=True)
                continue
            table.measure(count)
    print(f"{perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
