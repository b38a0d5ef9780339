"""Milliseconds and memory of the distillation loss, forward and backward: ours, all logits at once, and Liger's.

Student and teacher hidden states, output projections of a 128 k vocabulary, bf16. Peak memory is what the call adds to
its inputs, gradients included. Liger has two (both JSD): `fused jsd` is its Triton kernel over chunks, without cross
entropy; `chunked jsd` is its compiled chunked loss with cross entropy, which is what ours computes too. `ideal` are the
four products alone, at the bf16 rate measured in the same run. Appends to benchmarks/results/distill_loss.csv.

    python -m benchmarks.distill_loss                                    # about a minute on an H200
    python -m benchmarks.distill_loss --tiny --device cpu                # checks that everything runs
"""

import argparse
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.rows import RESULTS, append_row
from tightfit.kernels.loss.linear_distillation import (
    DIVERGENCES,
    DistillationTerms,
    linear_distillation,
    linear_distillation_eager,
)

Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
SHAPES = ((16384, 2048, 4096, 128256), (8192, 4096, 4096, 128256))
"""Rows, student and teacher widths, vocabulary."""


def losses() -> dict[str, Loss]:
    """Implementations by name."""
    made: dict[str, Loss] = {}
    for divergence in DIVERGENCES:
        terms = DistillationTerms(alpha=0.5, temperature=2.0, divergence=divergence)
        made[f"tightfit {divergence}"] = partial(linear_distillation, terms=terms)
        made[f"eager {divergence}"] = partial(all_at_once, terms=terms)
    if find_spec("liger_kernel"):
        made |= liger()
    return made


def all_at_once(h: Tensor, w: Tensor, g: Tensor, t: Tensor, y: Tensor, *, terms: DistillationTerms) -> Tensor:
    """The reference, summed."""
    return linear_distillation_eager(h, w, g, t, y, terms).sum()


def liger() -> dict[str, Loss]:
    """Liger's two."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
    from liger_kernel.transformers import LigerFusedLinearJSD

    fused: Any = LigerFusedLinearJSD(jsd_beta=0.5, temperature=2.0)
    chunked: Any = LigerFusedLinearJSDLoss(weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, temperature=2.0)
    return {
        "liger fused jsd": lambda h, w, g, t, y: fused(h, w, g, t, y),
        "liger chunked jsd": lambda h, w, g, t, y: chunked(h, w, g, t, y),
    }


def measure(loss: Loss, parts: list[Tensor], repeats: int) -> tuple[float, int]:
    """Median milliseconds, and peak bytes beside the inputs."""
    on_gpu = parts[0].is_cuda
    times, peak_bytes = [], 0
    for _ in range(repeats):
        for x in parts[:2]:
            x.grad = None
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if on_gpu else 0
        began = perf_counter()
        loss(*parts).backward()
        if on_gpu:
            torch.cuda.synchronize()
            peak_bytes = torch.cuda.max_memory_allocated() - before
        times.append((perf_counter() - began) * 1e3)
    return median(times[repeats // 3 :]), peak_bytes


def ideal_ms(parts: list[Tensor], repeats: int) -> float:
    """The student's three products and the teacher's one, as single calls on a quarter of the rows, times four."""
    hidden, weight, taught, teacher, _ = (x.detach() for x in parts)
    rows = max(len(hidden) // 4, 1)
    h, g = hidden[:rows], taught[:rows]
    times = []
    for _ in range(repeats):
        if h.is_cuda:
            torch.cuda.synchronize()
        began = perf_counter()
        logits = h @ weight.T
        g @ teacher.T
        logits @ weight
        logits.T @ h
        if h.is_cuda:
            torch.cuda.synchronize()
        times.append((perf_counter() - began) * 1e3)
    return 4 * median(times[repeats // 3 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small shapes, and no rows written")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    chosen = parser.parse_args()
    dtype = torch.bfloat16 if chosen.device == "cuda" else torch.float32
    for rows, width, teacher_width, vocabulary in ((64, 32, 48, 500),) if chosen.tiny else SHAPES:
        torch.manual_seed(0)
        shapes = (rows, width), (vocabulary, width), (rows, teacher_width), (vocabulary, teacher_width)
        parts = [(torch.randn(shape, device=chosen.device) / shape[1] ** 0.5).to(dtype) for shape in shapes]
        parts.append(torch.randint(0, vocabulary, (rows,), device=chosen.device))
        for x in parts[:2]:
            x.requires_grad_()
        ideal = ideal_ms(parts, chosen.repeats)
        for name, loss in losses().items():
            try:
                ms, peak_bytes = measure(loss, parts, chosen.repeats)
            except torch.OutOfMemoryError:
                ms, peak_bytes = float("nan"), -1
                torch.cuda.empty_cache()
            row = {
                "loss": name,
                "rows": rows,
                "width": width,
                "teacher_width": teacher_width,
                "vocabulary": vocabulary,
                "ms": round(ms, 2),
                "ideal_ms": round(ideal, 2),
                "peak_gib": round(peak_bytes / 2**30, 3),
            }
            print(row, flush=True)
            if not chosen.tiny:
                append_row("distill_loss", row, folder=chosen.results, commit=chosen.commit)


if __name__ == "__main__":
    main()
