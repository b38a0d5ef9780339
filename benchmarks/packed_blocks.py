"""Microseconds of 4-bit products of 16 to 256 rows by how kernels/quantized/packed_blocks.py cuts them, beside bf16.

Every call reads another weight than the one before, more of them than the L2 cache holds, in a replayed CUDA graph
(`milliseconds` of benchmarks/quantized_linear.py). Cuts are compiled and launched by several processes first, and one
that stops the card there is named and left out. A cut that is further from float64 than eager is in 16 bits, or gives
other bits the second time, is named and has no time. `bound_us` is what reading the codes, scales and zero points alone
takes at the copy rate of the same run. Appends to results/packed_blocks.csv; half a minute on an H200.

    python -m benchmarks.packed_blocks
    python -m benchmarks.packed_blocks --rows 64 --rounds 50
    python -m benchmarks.packed_blocks --rule --rows 17 --rows 48      # what is chosen alone
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

from benchmarks.quantized_linear import SHAPES, copy_gb_s, milliseconds
from benchmarks.quantized_peers import Product
from benchmarks.rows import RESULTS, append_row
from tightfit.kernels.operators import multiprocessors
from tightfit.kernels.quantized.packed_blocks import LEAST_TILES, TILE, Blocks, Scaled, blocks_for, launch_blocks
from tightfit.kernels.quantized.packed_rows import by_group, launch_packed_rows, row_tiles_for
from tightfit.kernels.quantized.quantized_linear import expanded, launch_some, quantized_linear_eager, tiles_for

BITS, GROUP = 4, 128
SPREAD_BYTES = 256 * 2**20
ROWS = (8, 16, 32, 48, 64, 96, 128, 192, 256)
"""Those without cuts of their own are cut by the rule."""
PROGRAMS = (100, 280)
"""Fewer leave a third of the processors idle, more give each too little."""
UNTRIED = "untried"
FIELDS = ("block_m", "block_n", "split", "stages", "warps", "scaled")


class Cut(NamedTuple):
    """`Blocks` but for the split, and whether a kernel begins before its predecessor ends."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    scaled: Scaled
    overlap: bool = False

    def blocks(self, split: int) -> Blocks:
        return Blocks(self.block_m, self.block_n, split, self.stages, self.warps, self.scaled)


CUTS: dict[int, tuple[Cut, ...]] = {
    16: (Cut(16, 128, 4, 4, "sums"), Cut(16, 128, 4, 6, "sums")),
    32: (
        Cut(32, 128, 4, 4, "sums"),
        Cut(32, 128, 4, 3, "sums"),
        Cut(32, 256, 16, 4, "sums"),
        Cut(32, 128, 4, 3, "sums", overlap=True),
    ),
    64: (
        Cut(64, 128, 4, 4, "sums"),
        Cut(64, 128, 4, 3, "sums"),
        Cut(64, 128, 8, 4, "sums"),
        Cut(64, 128, 4, 4, "weights"),
        Cut(64, 256, 16, 4, "sums"),
        Cut(64, 128, 4, 4, "sums", overlap=True),
    ),
    128: (
        Cut(64, 128, 4, 4, "sums"),
        Cut(64, 128, 8, 4, "sums"),
        Cut(128, 128, 8, 3, "sums"),
        Cut(128, 128, 4, 3, "weights"),
        Cut(128, 256, 16, 4, "weights"),
    ),
    256: (
        Cut(128, 128, 4, 3, "weights"),
        Cut(128, 128, 8, 3, "weights"),
        Cut(128, 128, 8, 3, "sums"),
        Cut(256, 128, 8, 3, "weights"),
        Cut(64, 128, 4, 4, "sums"),
        Cut(128, 256, 16, 4, "weights"),
        Cut(128, 128, 4, 3, "weights", overlap=True),
    ),
}


class Launch(NamedTuple):
    """A cut at one shape."""

    cut: Cut
    rows: int
    inputs: int
    outputs: int
    split: int


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


def launches(rows: list[int], rule_alone: bool) -> list[Launch]:
    """What will be timed: every cut at both shapes, and the rule's own."""
    found, processors = [], multiprocessors(torch.device("cuda"))
    for count in rows:
        for inputs, outputs in SHAPES:
            rule = blocks_for(count, outputs, inputs, processors)
            own = Cut(rule.block_m, rule.block_n, rule.warps, rule.stages, rule.scaled)
            found.append(Launch(own, count, inputs, outputs, rule.split))
            for cut in () if rule_alone else CUTS.get(count, ()):
                found += [Launch(cut, count, inputs, outputs, at) for at in splits(cut, count, outputs, inputs)]
    return list(dict.fromkeys(found))


def first_launches(wanted: list[Launch]) -> str:
    """Compiles a kernel, which stays in Triton's cache, and launches it at all shapes; what was raised, or nothing."""
    try:
        torch.cuda.synchronize()
    except Exception:  # an earlier kernel's fault, after which a process can launch no other
        return UNTRIED
    for cut, rows, inputs, outputs, split in wanted:
        x = torch.zeros(rows, inputs, device="cuda", dtype=torch.bfloat16)
        try:
            launch_blocks(x, *coded(outputs, inputs), GROUP, cut.blocks(split), cut.overlap)
            torch.cuda.synchronize()
        except Exception as error:
            return f"{rows} x {inputs} x {outputs} in {split}: {type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def those_that_run(wanted: list[Launch], workers: int) -> list[Launch]:
    """Kernels are compiled and first launched in processes of their own; those that stop the card are named."""
    began, kernels = perf_counter(), dict[tuple[Cut, bool], list[Launch]]()
    for launch in wanted:
        kernels.setdefault((launch.cut, launch.split > 1), []).append(launch)
    found: dict[tuple[Cut, bool], str] = dict.fromkeys(kernels, UNTRIED)
    while untried := [kernel for kernel, told in found.items() if told == UNTRIED]:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            found |= dict(zip(untried, pool.map(first_launches, [kernels[key] for key in untried]), strict=True))
    for (cut, _), told in found.items():
        if told:
            print(cut, "is left out:", told, flush=True)
    print(f"{len(found)} kernels, {perf_counter() - began:.1f} s", flush=True)
    return [launch for launch in wanted if not found[launch.cut, launch.split > 1]]


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

    def __init__(self, inputs: int, outputs: int, launches: list[Launch], arguments: argparse.Namespace) -> None:
        self.inputs, self.outputs, self.launches, self.arguments = inputs, outputs, launches, arguments
        count = max(SPREAD_BYTES * 8 // (inputs * outputs * BITS), 2)
        self.coded = [coded(outputs, inputs) for _ in range(count)]
        self.wide = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(count)]
        held_bytes = sum(tensor.nbytes for tensor in self.coded[0])
        self.bound_us = round(held_bytes / arguments.copy_gb_s / 1e3, 2)

    def measure(self, rows: int) -> None:
        """All cuts of that many rows that run, the fastest first when printed."""
        x = torch.randn(rows, self.inputs, device="cuda", dtype=torch.bfloat16)
        truth = quantized_linear_eager(x.double(), *self.coded[0], BITS, GROUP)
        eager = _error(quantized_linear_eager(x, *self.coded[0], BITS, GROUP), truth)
        bf16_us = self.timed([partial(F.linear, weight=w) for w in self.wide], x)
        made: list[dict[str, Any]] = []

        def keep(row: dict[str, Any]) -> None:
            """Written at once: a kernel that stops the card takes nothing away."""
            told = {"rows": rows, "inputs": self.inputs, "outputs": self.outputs, **row}
            told |= {"bf16_us": bf16_us, "bound_us": self.bound_us, "eager_error": eager}
            append_row("packed_blocks", told, folder=self.arguments.results, commit=self.arguments.commit)
            made.append(row)

        keep({"kernel": "bf16", "us": bf16_us, "error": "", **dict.fromkeys(FIELDS, "")})
        calls: list[Product] = [partial(one_before, weight=w) for w in self.coded]
        error = _error(calls[0](x), truth)
        keep({"kernel": "other cards'", "us": self.timed(calls, x), "error": error, **dict.fromkeys(FIELDS, "")})
        rule = blocks_for(rows, self.outputs, self.inputs, multiprocessors(x.device))
        for launch in self.launches:
            if launch[1:4] == (rows, self.inputs, self.outputs):
                keep(self.row(x, launch.cut, launch.split, truth, eager, rule))
        print(f"\n{rows} x {self.inputs} x {self.outputs}: bound {self.bound_us:.1f} us, eager's error {eager:.5f}")
        for row in sorted(made, key=lambda row: float(row["us"] or "inf")):
            print(*(f"{row[name]!s:>12.12}" for name in ("kernel", "us", "error", *FIELDS)), flush=True)

    def timed(self, calls: list[Product], x: Tensor) -> float:
        """Microseconds of one."""
        return round(1e3 * milliseconds(calls, x, self.arguments.rounds), 2)

    def row(self, x: Tensor, cut: Cut, split: int, truth: Tensor, eager: float, rule: Blocks) -> dict[str, Any]:
        """One cut's row; without a time where it is wrong or does not fit."""
        blocks = cut.blocks(split)
        kernel = ("rule" if blocks == rule else "blocks") + (" overlap" if cut.overlap else "")
        told: dict[str, Any] = {"kernel": kernel, "us": "", "error": "", **blocks._asdict()}
        calls: list[Product] = [partial(_product, weight=w, blocks=blocks, overlap=cut.overlap) for w in self.coded]
        found = calls[0](x)
        told["error"] = _error(found, truth)
        took = self.timed(calls, x)
        if not torch.equal(found, calls[0](x)):
            print("other bits the second time:", cut, split, flush=True)
        elif told["error"] > 1.1 * eager + 1e-5:
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
    parser.add_argument("--rows", type=int, action="append", help="these numbers alone")
    parser.add_argument("--rule", action="store_true", help="what `blocks_for` chooses alone")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--budget", type=float, default=100.0, help="seconds after which nothing further is measured")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    arguments = parser.parse_args()
    began, rows = perf_counter(), arguments.rows or list(ROWS)
    wanted = those_that_run(launches(rows, arguments.rule), arguments.workers)
    arguments.copy_gb_s = copy_gb_s(torch.device("cuda"))
    for inputs, outputs in SHAPES:
        table = Table(inputs, outputs, wanted, arguments)
        for count in rows:
            if perf_counter() - began > arguments.budget:
                print(f"{count} x {inputs} x {outputs} is passed over: no time is left", flush=True)
                continue
            table.measure(count)
    print(f"{perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
