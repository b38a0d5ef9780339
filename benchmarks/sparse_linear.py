"""Milliseconds of x · Wᵀ with a 2:4 weight in torch's semi-structured form beside the dense product: MLP of 8B.

Weights rotate through more memory than the L2 cache holds, as in a model. `gain` is dense time over sparse time; twice
is the limit of the arithmetic, 16/9 that of reading the weight. Appends to benchmarks/results/sparse_linear.csv; takes
about a minute on an H200.

    python -m benchmarks.sparse_linear
    python -m benchmarks.sparse_linear --tiny --device cpu      # the dense product alone: checks that the script runs
"""

import argparse
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.sparse import SparseSemiStructuredTensor, to_sparse_semi_structured

from benchmarks.rows import RESULTS, append_row
from tightfit.compress.pruning import Sparsity, magnitude

ROWS = (1, 16, 64, 256, 2048, 8192)
SPREAD_BYTES = 256 * 2**20


def time_ms(call: Callable[[], object], device: str, repeats: int) -> float:
    """Median milliseconds of a call."""
    times = []
    for _ in range(repeats):
        if device == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            began = perf_counter()
            call()
            times.append((perf_counter() - began) * 1e3)
    return median(times[repeats // 4 :])


def sparse_forms(weights: list[Tensor]) -> dict[str, list[Tensor]]:
    """The weights in the forms that this torch has kernels for."""
    made: dict[str, list[Tensor]] = {}
    for name, cutlass in (("cusparselt", False), ("cutlass", True)):
        SparseSemiStructuredTensor._FORCE_CUTLASS = cutlass
        try:
            forms: list[Tensor] = [to_sparse_semi_structured(weight) for weight in weights]
            F.linear(torch.zeros(64, weights[0].shape[1], device="cuda", dtype=weights[0].dtype), forms[0])
            made[name] = forms
        except (RuntimeError, NotImplementedError, ValueError) as error:
            print(f"{name}: {error}")
    return made


@torch.no_grad()
def measure(rows: int, outputs: int, inputs: int, device: str, repeats: int) -> list[dict[str, object]]:
    """One row of results for every form."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    copies = max(SPREAD_BYTES // (outputs * inputs * 2), 1) if device == "cuda" else 1
    two_of_four = Sparsity(kept=2, group=4)
    weights = [magnitude(torch.randn(outputs, inputs, device=device), two_of_four).to(dtype) for _ in range(copies)]
    x = torch.randn(rows, inputs, device=device, dtype=dtype)
    forms = {"dense": weights, **(sparse_forms(weights) if device == "cuda" else {})}
    results: list[dict[str, object]] = []
    dense_ms = 0.0
    for name, held in forms.items():
        turn = cycle(held)
        wanted, found = F.linear(x.float(), weights[0].float()), F.linear(x, held[0]).float()
        error = float((found - wanted).norm() / wanted.norm())
        ms = time_ms(lambda turn=turn: F.linear(x, next(turn)), device, repeats)  # type: ignore[misc]
        dense_ms = ms if name == "dense" else dense_ms
        row = {"form": name, "rows": rows, "outputs": outputs, "inputs": inputs}
        results.append({**row, "ms": round(ms, 5), "gain": round(dense_ms / ms, 3), "relative_error": f"{error:.1e}"})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small shapes, and no rows written")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    arguments = parser.parse_args()
    shapes = [(128, 64)] if arguments.tiny else [(14336, 4096), (4096, 14336), (4096, 4096)]
    for outputs, inputs in shapes:
        for rows in (1, 16) if arguments.tiny else ROWS:
            for row in measure(rows, outputs, inputs, arguments.device, 4 if arguments.tiny else arguments.repeats):
                print(row, flush=True)
                if not arguments.tiny:
                    append_row("sparse_linear", row, folder=arguments.results, commit=arguments.commit)


if __name__ == "__main__":
    main()
