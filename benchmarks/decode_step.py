"""Microseconds of a layer in a decoding step of many sequences, with norms as kernels of their own and inside products.

Layers of Llama's 8B shape with random weights run over a paged cache as an engine's captured steps do; both ways are
captured and replayed by turns. `error` is each way's distance from the same step in float32, as a share. Appends to
results/decode_step.csv.

    python -m benchmarks.decode_step
    python -m benchmarks.decode_step --tiny --results ROWS    # on a CPU, where norms are always kernels of their own
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.rows import RESULTS, append_row
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.resolve import resolve_spec
from tightfit.serve.forward.runner import Runner, make_cache
from tightfit.serve.schedule.step import Step

BLOCK_SIZE = 16


class Steps:
    """Decoding steps of `sequences`, each of `keys` tokens, through a few layers."""

    def __init__(
        self, shape: str, layers: int, sequences: int, keys: int, device: torch.device, **changes: Any
    ) -> None:
        """`changes` are to the spec of `shape`."""
        torch.manual_seed(0)
        spec = replace(resolve_spec(shape), layers=layers, vocab_size=1024, **changes)
        with device:
            self.model = Decoder(spec)
        init_weights(self.model)
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        pages = -(-keys // BLOCK_SIZE)
        blocks = sequences * pages
        self.tables = torch.randperm(blocks, device=device).int().view(sequences, pages)
        self.kept = torch.randn(layers, 2, blocks + 1, BLOCK_SIZE, spec.kv_heads, spec.head_dim, device=device)
        self.sequences, self.keys, self.device = sequences, keys, device

    def runner(self, dtype: torch.dtype) -> Runner:
        """The model in `dtype`, over a cache that has the same numbers each time."""
        cache = make_cache(self.model.spec, self.kept.shape[2], BLOCK_SIZE, self.device, dtype)
        cache.storage[:, :, : self.kept.shape[2]] = self.kept
        return Runner(self.model.to(dtype), cache, self.keys + 1, self.sequences)

    def step(self) -> Step:
        """One token of each sequence."""
        last = self.keys - 1
        lengths = torch.full((self.sequences,), self.keys, device=self.device)
        return Step(
            tokens=torch.arange(self.sequences, device=self.device)[None],
            positions=lengths[None] - 1,
            slots=self.tables[:, last // BLOCK_SIZE].long() * BLOCK_SIZE + last % BLOCK_SIZE,
            decode_tokens=self.sequences,
            tables=self.tables,
            lengths=lengths,
            longest=self.keys,
            rows=torch.arange(self.sequences, device=self.device),
            block_size=BLOCK_SIZE,
        )


def captured(run: Callable[[], Tensor]) -> Callable[[], None]:
    """`run` as a graph, where there is a card."""
    run()
    if not torch.cuda.is_available():
        return lambda: (run(), None)[1]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def seconds(run: Callable[[], None], times: int) -> float:
    """Of one run, between two waits for the device."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    began = time.perf_counter()
    for _ in range(times):
        run()
    wait()
    return (time.perf_counter() - began) / times


@torch.inference_mode()
def compared(steps: Steps, rounds: int, times: int) -> Iterator[dict[str, Any]]:
    """Both ways, or the one there is, by turns."""
    step = steps.step()
    truth = steps.runner(torch.float32).states(step).double()
    runner = steps.runner(steps.dtype)
    program = runner.program
    assert program is not None
    ways, errors = {}, {}
    for inside in sorted({False, program.norms_in_products}):
        program.norms_in_products = inside
        errors[inside] = float((runner.states(step).double() - truth).norm() / truth.norm())
        ways[inside] = captured(partial(runner.states, step))
    found: dict[bool, list[float]] = {inside: [] for inside in ways}
    for _ in range(rounds):
        for inside, run in ways.items():
            found[inside].append(seconds(run, times))
    for inside, each in found.items():
        us = 1e6 * statistics.median(each) / steps.model.spec.layers
        yield {"norms_in_products": inside, "us_a_layer": round(us, 2), "error": round(errors[inside], 6)}


def main() -> None:
    """Each number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--keys", type=int, default=384)
    parser.add_argument("--sequences", type=int, nargs="+", default=[2, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.layers, arguments.keys, arguments.sequences, arguments.rounds = 2, 37, [2], 2
    device, shape = (
        torch.device("cpu" if arguments.tiny else "cuda"),
        "tiny-llama" if arguments.tiny else "llama-3.1-8b",
    )
    for sequences in arguments.sequences:
        steps = Steps(shape, arguments.layers, sequences, arguments.keys, device)
        known = {"model": shape, "layers": arguments.layers, "sequences": sequences, "keys": arguments.keys}
        for made in compared(steps, arguments.rounds, times=2 if arguments.tiny else 20):
            print(known | made, flush=True)
            append_row("decode_step", known | made, folder=arguments.results, commit=arguments.commit)


if __name__ == "__main__":
    main()
