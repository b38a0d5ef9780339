"""Milliseconds of x · Wᵀ with a 2:4 weight in torch's semi-structured forms beside the dense product.

In CUDA graphs (`graph_ms`), where the device alone is timed, and as torch launches it (`called_ms`): cuSPARSELt's plan
is made anew at every call, on the host. Weights rotate through more memory than the L2 cache holds, as in a model.
`gain` is the dense product's time in a graph over the form's; twice is the limit of the arithmetic, 16/9 that of
reading the weight. `cusparselt searched` takes the algorithm that the library finds fastest for the shape. Appends to
benchmarks/results/sparse_graphs.csv (sparse_linear.csv has calls that were timed one by one, the host with them); half
a minute on an H200.

    python -m benchmarks.sparse_linear
    python -m benchmarks.sparse_linear --tiny --device cpu      # the dense product alone: checks that the script runs
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.sparse import SparseSemiStructuredTensor, to_sparse_semi_structured

from benchmarks.quantized_linear import milliseconds
from benchmarks.rows import RESULTS, append_row
from tightfit.compress.structure.pruning import Sparsity, magnitude

ROWS = (64, 512, 2048, 8192)
SHAPES = ((14336, 4096), (8192, 8192))
"""Outputs and inputs."""
SPREAD_BYTES = 256 * 2**20
FORMS = ("cusparselt", "cusparselt searched", "cutlass")
Product = Callable[[Tensor], Tensor]


def sparse_form(name: str, weights: list[Tensor], x: Tensor) -> list[Product]:
    """Products of x by weights in one of the forms."""
    SparseSemiStructuredTensor._FORCE_CUTLASS = name == "cutlass"
    held: list[Any] = [to_sparse_semi_structured(weight) for weight in weights]
    if name == "cusparselt searched":
        found = torch._cslt_sparse_mm_search(held[0].packed, x.t(), transpose_result=True)
        return [partial(_searched, weight.packed, int(found)) for weight in held]
    return [partial(_product, weight) for weight in held]


def _product(weight: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, weight)


def _searched(packed: Tensor, algorithm: int, x: Tensor) -> Tensor:
    return torch._cslt_sparse_mm(packed, x.t(), transpose_result=True, alg_id=algorithm)


def called_ms(calls: list[Product], x: Tensor) -> float:
    """A call, one launched after the other without waiting."""
    for call in calls:
        call(x)
    if not x.is_cuda:
        return milliseconds(calls, x, 1)
    torch.cuda.synchronize()
    began = perf_counter()
    for call in calls * 4:
        call(x)
    torch.cuda.synchronize()
    return (perf_counter() - began) * 1e3 / len(calls) / 4


def measured(name: str, calls: list[Product], x: Tensor, weight: Tensor, rounds: int) -> dict[str, Any]:
    """A row of the table, without its gain."""
    wanted, found = F.linear(x.float(), weight.float()), calls[0](x).float()
    graph_ms = milliseconds(calls, x, rounds)
    return {
        "form": name,
        "rows": len(x),
        "outputs": weight.shape[0],
        "inputs": weight.shape[1],
        "graph_ms": round(graph_ms, 5),
        "called_ms": round(called_ms(calls, x), 5),
        "tflop_s": round(2e-9 * len(x) * weight.numel() / graph_ms, 1),
        "relative_error": f"{float((found - wanted).norm() / wanted.norm()):.1e}",
    }


@torch.no_grad()
def measure(rows: int, outputs: int, inputs: int, device: str, rounds: int) -> list[dict[str, Any]]:
    """One row of results for every form that this torch and this card have."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    copies = SPREAD_BYTES // (outputs * inputs * 2) + 1 if device == "cuda" else 1
    two_of_four = Sparsity(kept=2, group=4)
    weights = [magnitude(torch.randn(outputs, inputs, device=device), two_of_four).to(dtype) for _ in range(copies)]
    x = torch.randn(rows, inputs, device=device, dtype=dtype)
    results = [measured("dense", [partial(_product, weight) for weight in weights], x, weights[0], rounds)]
    for name in FORMS if device == "cuda" else ():
        try:
            results.append(measured(name, sparse_form(name, weights, x), x, weights[0], rounds))
        except (RuntimeError, NotImplementedError, ValueError) as error:
            print(f"{name} refuses {rows} x {inputs} x {outputs}: {str(error).splitlines()[0]}", flush=True)
    return [{**row, "gain": round(results[0]["graph_ms"] / row["graph_ms"], 3)} for row in results]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small shapes, and no rows written")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    arguments = parser.parse_args()
    for outputs, inputs in [(128, 64)] if arguments.tiny else SHAPES:
        for rows in (1, 16) if arguments.tiny else ROWS:
            for row in measure(rows, outputs, inputs, arguments.device, arguments.rounds):
                print(row, flush=True)
                if not arguments.tiny:
                    append_row("sparse_graphs", row, folder=arguments.results, commit=arguments.commit)


if __name__ == "__main__":
    main()
