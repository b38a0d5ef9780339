"""What the serving engine takes of a GPU's memory, line by line, beside what its budget said before.

An engine decides its cache from four predictions: weights, cache, the largest step's activations and logits, and what
is kept for captured graphs. Here each stands beside what the driver and torch's allocator count: weights before the
engine is made; the cache's tensors; all else that the driver gave out while it started (graphs and their pools,
buffers, kernels' code, libraries' workspaces); the peak above that in the largest steps there are. The sum is what
the driver has given out at the end, from which the context, which is there before, is left out.

The largest steps: all sequences at once with as many tokens as a step takes, greedy and cut by top-p; and whole
prompts of the longest length. Weights are random. Rows go to benchmarks/results/serve_memory.csv.

    python -m benchmarks.serve_memory                     1B, 8B, 8B in 4 bits and in fp8 on a GPU: under a minute
    python -m benchmarks.serve_memory --tiny --device cpu the same code on a tiny model
"""

import argparse
import gc
import time
import traceback
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.rows import RESULTS, append_row
from benchmarks.serve_speed import Bench
from tightfit.serve.budget import Budget, graph_bytes
from tightfit.serve.engine import Engine
from tightfit.serve.graphs.compiler import start_compiler
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling

CASES = {
    "1b": ("1b", None, False),
    "8b": ("8b", None, False),
    "8b-int4": ("8b", 4, False),
    "8b-fp8": ("8b", None, True),
}
GREEDY, CUT = Sampling(max_tokens=1, temperature=0), Sampling(max_tokens=1, temperature=1.0, top_p=0.9, seed=3)
MIB = 2**20


@dataclass(frozen=True)
class Taken:
    """Memory at one moment."""

    given_bytes: int
    """By the driver, to whoever runs on the card."""
    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int
    """Allocated at most since the last moment."""


def now(device: torch.device) -> Taken:
    """What is taken now; nothing on a CPU, whose tensors nobody counts."""
    if device.type != "cuda":
        return Taken(0, 0, 0, 0)
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    counted = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    taken = Taken(total - free, *counted, torch.cuda.max_memory_allocated(device))
    torch.cuda.reset_peak_memory_stats(device)
    return taken


def release() -> None:
    """Give back what nothing refers to."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def largest_steps(bench: Bench) -> dict[str, list[Request]]:
    """Requests whose first step is as large as any, by name."""
    assert bench.engine is not None
    sequences, tokens = bench.config.max_sequences, bench.config.step_tokens
    longest = min(bench.engine.max_length - 1, tokens)
    shapes = {"greedy": (sequences, tokens // sequences), "top_p": (sequences, tokens // sequences)}
    shapes["prompt"] = (max(1, tokens // longest), longest)
    return {
        name: [
            Request(id=str(i), prompt=request.prompt, sampling=CUT if name == "top_p" else GREEDY)
            for i, request in enumerate(bench.requests([(prompt, 1)] * count))
        ]
        for name, (count, prompt) in shapes.items()
    }


def measure(case: str, arguments: argparse.Namespace) -> dict[str, object]:
    """One model: a start and its largest steps, as a row."""
    name, bits, fp8 = CASES.get(case, (case, None, False))
    options = argparse.Namespace(
        device=arguments.device, tiny=name == "tiny", fp8=fp8, bits=bits, head=None, no_overlap=False
    )
    device = torch.device(arguments.device)
    release()
    torch.zeros(1, device=device)  # the context
    before = now(device)
    with start_compiler(arguments.device) or nullcontext() as compiler:
        bench = Bench(name, options)
        release()
        loaded = now(device)
        bench.engine = engine = Engine(bench.model, None, bench.config, compiler=compiler)
    started = now(device)
    steps = {}
    for load, requests in largest_steps(bench).items():
        engine.generate(requests)
        steps[load] = now(device).peak_bytes - started.allocated_bytes
    ended = now(device)
    assert engine.pool.free == engine.pool.size
    cache = engine.runner.cache
    held = {"weights": loaded.allocated_bytes - before.allocated_bytes, "cache": cache.bytes}
    held["graphs"] = started.given_bytes - before.given_bytes - held["weights"] - held["cache"]
    held["step"] = max(steps.values())
    held["total"] = ended.given_bytes - before.given_bytes
    conditions = {"model": name, "weights_in": bench.weights, "sequences": bench.config.max_sequences}
    told = {**conditions, "step_tokens": bench.config.step_tokens, **beside(engine.budget, held, device)}
    counted = {f"step_{load}": taken for load, taken in steps.items()}
    counted |= {"reserved_at_start": started.reserved_bytes, "reserved_at_end": ended.reserved_bytes}
    counted |= {"left_free": torch.cuda.mem_get_info()[0] if device.type == "cuda" else 0}
    return told | {f"{key}_mib": round(value / MIB, 1) for key, value in counted.items()}


def beside(budget: Budget, held: dict[str, int], device: torch.device) -> dict[str, float]:
    """Every line predicted and measured, in MiB."""
    predicted = {
        "weights": budget.weight_bytes,
        "cache": budget.cache_bytes,
        "graphs": graph_bytes(budget.free_bytes) if device.type == "cuda" else 0,
        "step": budget.step_bytes,
    }
    predicted["total"] = sum(predicted.values())
    found = {f"predicted_{line}_mib": round(value / MIB, 1) for line, value in predicted.items()}
    return found | {f"{line}_mib": round(held[line] / MIB, 1) for line in predicted}


def main() -> None:
    """All models, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", action="append", choices=list(CASES), help="these alone")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape: a check that the script runs")
    parser.add_argument("--budget", type=float, default=50.0, help="seconds after which no further model begins")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    arguments = parser.parse_args()
    began, rows = time.perf_counter(), []
    for case in ["tiny"] if arguments.tiny else arguments.case or list(CASES):
        if time.perf_counter() - began > arguments.budget:
            print(f"{case} passed over: the budget of {arguments.budget:g} s is spent")
            continue
        try:
            rows.append(measure(case, arguments))
            append_row("serve_memory", rows[-1], folder=arguments.results, commit=arguments.commit)
        except Exception:
            print(f"{case} failed")
            traceback.print_exc()
        print(f"{case}: {time.perf_counter() - began:.0f} s since the beginning", flush=True)
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
