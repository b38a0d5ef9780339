"""Microseconds of a decoding step's attention by how many keys a program takes at a time, its warps and its stages.

A captured graph runs layers as an engine does: the qkv product, then attention, which begins while the product ends.
Every layer has weights and keys of its own, more of them than the cache holds. `us` is what attention adds to the
products alone; `bound_us` is what reading keys and values takes at the copy rate of the same run. A cut that differs
from attention in float32 by more than bf16 rounds is named and has no time. Appends to results/decode_attention.csv.

    python -m benchmarks.decode_attention
    TRITON_INTERPRET=1 python -m benchmarks.decode_attention --tiny --results ROWS    # on a CPU; its times mean nothing
"""

import argparse
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.quantized_linear import copy_gb_s, milliseconds
from benchmarks.quantized_peers import Product
from benchmarks.rows import RESULTS, append_row
from tightfit.kernels.decoding.decode_attention import decode_attention, decode_attention_eager
from tightfit.kernels.decoding.paged_attention import KeyBlocks, key_blocks

BLOCK_SIZE = 16
SHARED_BYTES = 220 * 2**10
"""Of a processor's memory that a program's blocks may take."""


class Shape(NamedTuple):
    """A model's attention; its qkv product is as wide as it needs."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head: int


class Load(NamedTuple):
    """Sequences of a step, and the keys of each."""

    sequences: int
    keys: int


SHAPES = (Shape("8b", 4096, 32, 8, 128), Shape("1b", 2048, 32, 8, 64))
LOADS = (Load(64, 384), Load(64, 264), Load(64, 512), Load(200, 384), Load(16, 384), Load(8, 2048))
TINY_SHAPES, TINY_LOADS = (Shape("tiny", 32, 4, 2, 16),), (Load(3, 37),)
ONE_LAYER_BYTES = 48 * 2**20
"""Keys and values of a layer are at least as many, or there are more layers: so that they come from memory."""


def cuts(shape: Shape, tiny: bool) -> Iterator[KeyBlocks]:
    """What is tried, the one in use first."""
    yield key_blocks(shape.head, 2, 2)
    for keys, warps, stages in product((16,) if tiny else (16, 32, 64), (1, 2, 4), (3, 6)):
        if 2 * keys * shape.head * 2 * (stages - 1) <= SHARED_BYTES and keys * shape.head <= 4096 * warps:
            yield KeyBlocks(keys, warps, stages)


class Layers:
    """Layers of one shape under one load, on one device."""

    def __init__(self, shape: Shape, load: Load, device: torch.device) -> None:
        self.shape, self.load = shape, load
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        random = partial(torch.randn, device=device, dtype=dtype)
        pages = -(-load.keys // BLOCK_SIZE)
        self.read_bytes = 2 * load.sequences * load.keys * shape.kv_heads * shape.head * dtype.itemsize
        layers = 2 if device.type == "cpu" else min(16, max(4, 8 * ONE_LAYER_BYTES // self.read_bytes))
        order = torch.randperm(load.sequences * pages, device=device, dtype=torch.int32)
        self.tables = order.view(load.sequences, pages)
        self.lengths = torch.full((load.sequences,), load.keys, device=device, dtype=torch.int32)
        self.counters = torch.zeros(load.sequences * shape.kv_heads, device=device, dtype=torch.int32)
        blocks = load.sequences * pages
        self.caches = [random(2, blocks, BLOCK_SIZE, shape.kv_heads, shape.head) for _ in range(layers)]
        outputs = (shape.heads + 2 * shape.kv_heads) * shape.head
        self.weights = [random(outputs, shape.hidden) * shape.hidden**-0.5 for _ in range(layers)]
        self.angles = torch.randn(2, load.keys, shape.head // 2, device=device).to(dtype)
        self.x = random(load.sequences, shape.hidden)

    def attend(self, layer: int, blocks: KeyBlocks | None, x: Tensor) -> Tensor:
        """The layer's qkv product and its attention; by the eager reference in float32 where there are no `blocks`."""
        (keys, values), (cos, sin) = self.caches[layer], self.angles
        inputs: Any = {"qkv": F.linear(x, self.weights[layer]), "keys": keys, "values": values, "cos": cos, "sin": sin}
        known: Any = {"tables": self.tables, "lengths": self.lengths}
        known |= {"heads": self.shape.heads, "scale": self.shape.head**-0.5}
        if blocks is None:
            return decode_attention_eager(**{name: each.float() for name, each in inputs.items()}, **known)
        return decode_attention(**inputs, **known, counters=self.counters, overlap=x.is_cuda, blocks=blocks)

    def us(self, blocks: KeyBlocks, rounds: int) -> float:
        """Microseconds of a layer's product and attention."""
        calls: list[Product] = [partial(self.attend, layer, blocks) for layer in range(len(self.caches))]
        return 1e3 * milliseconds(calls, self.x, rounds)

    def products_us(self, rounds: int) -> float:
        """Microseconds of a layer's product alone."""
        calls: list[Product] = [partial(F.linear, weight=weight) for weight in self.weights]
        return 1e3 * milliseconds(calls, self.x, rounds)

    def error(self, blocks: KeyBlocks) -> float:
        """How far `blocks` is from the reference, of whose size it is a share."""
        truth = self.attend(0, None, self.x).double()
        return float((self.attend(0, blocks, self.x).double() - truth).norm() / truth.norm())


def compile_one(shape: Shape, blocks: KeyBlocks) -> str:
    """Launch a kernel in a process of its own, which leaves it in Triton's cache; what was raised, or nothing."""
    try:
        Layers(shape, Load(64, 40), torch.device("cuda")).error(blocks)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def those_that_run(wanted: list[tuple[Shape, KeyBlocks]], workers: int) -> list[tuple[Shape, KeyBlocks]]:
    """The cuts that compile and launch; others are named."""
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        told = list(pool.map(compile_one, *zip(*wanted, strict=True)))
    for cut, error in zip(wanted, told, strict=True):
        if error:
            print(*cut, "is left out:", error, flush=True)
    return [cut for cut, error in zip(wanted, told, strict=True) if not error]


def main() -> None:
    """Every shape, load and cut."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds after which nothing further is measured")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    arguments = parser.parse_args()
    began, device = perf_counter(), torch.device("cpu" if arguments.tiny else "cuda")
    shapes, loads = (TINY_SHAPES, TINY_LOADS) if arguments.tiny else (SHAPES, LOADS)
    wanted = [(shape, cut) for shape in shapes for cut in dict.fromkeys(cuts(shape, arguments.tiny))]
    if not arguments.tiny:
        wanted = those_that_run(wanted, arguments.workers)
        print(f"{len(wanted)} kernels, {perf_counter() - began:.0f} s", flush=True)
    rate = copy_gb_s(device)
    for load, shape in product(loads, shapes):
        if perf_counter() - began > arguments.budget:
            print(f"{shape.name} {load} is passed over: no time is left", flush=True)
            continue
        own = [cut for at, cut in wanted if at == shape]
        rows = measured(Layers(shape, load, device), own, arguments.rounds, rate)
        for row in rows:
            append_row("decode_attention", row, folder=arguments.results, commit=arguments.commit)
        print(f"\n{shape.name} {load}: bound {rows[0]['bound_us']} us, products {rows[0]['products_us']} us")
        for row in sorted(rows, key=lambda row: float(row["us"] or "inf"))[:8]:
            print(*(f"{name} {row[name]}" for name in ("us", "block_keys", "warps", "stages", "in_use")), flush=True)


def measured(layers: Layers, blocks: list[KeyBlocks], rounds: int, rate: float) -> list[dict[str, Any]]:
    """A row for each cut."""
    products_us, rows = layers.products_us(rounds), []
    for cut in blocks:
        error = layers.error(cut)
        is_right = error < (0.01 if layers.x.is_cuda else 1e-5)
        if not is_right:
            print("wrong by", error, cut, flush=True)
        rows.append(
            {
                "model": layers.shape.name,
                "sequences": layers.load.sequences,
                "keys": layers.load.keys,
                "block_keys": cut.keys,
                "warps": cut.warps,
                "stages": cut.stages,
                "in_use": cut == blocks[0],
                "us": round(layers.us(cut, rounds) - products_us, 2) if is_right else "",
                "error": round(error, 6),
                "products_us": round(products_us, 2),
                "bound_us": round(layers.read_bytes / rate / 1e3, 2),
            }
        )
    return rows


if __name__ == "__main__":
    with torch.no_grad():
        main()
