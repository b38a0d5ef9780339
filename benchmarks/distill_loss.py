"""Milliseconds and memory of the distillation loss, forward and backward: ours, all logits at once, and Liger's.

Student and teacher hidden states, output projections of a 128 k vocabulary, bf16. Peak memory is what the call adds to
its inputs, gradients included. Liger has two (both JSD): `fused jsd` is its Triton kernel over chunks, without cross
entropy; `chunked jsd` is its compiled chunked loss with cross entropy, which is what ours computes too. `ideal` are the
four products alone, at the bf16 rate measured in the same run. Appends to benchmarks/results/distill_loss.csv.

`--errors` also prints how wrong each gradient of the student's projection is, beside float64, for some rows of it: what
is left of it besides multiples of the gradients of cross entropy and of the divergence, since losses weigh those
differently. `--taught-rows` and `--product-mib` try other sizes of our buffers, without writing rows.

    python -m benchmarks.distill_loss --errors                           # about two minutes on an H200
    python -m benchmarks.distill_loss --only "tightfit jsd" --taught-rows 512
    python -m benchmarks.distill_loss --tiny --device cpu --errors       # checks that everything runs
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.rows import RESULTS, append_row
from tightfit.kernels.loss.linear_cross_entropy import CHUNK_BYTES
from tightfit.kernels.loss.linear_distillation import (
    DIVERGENCES,
    DistillationTerms,
    linear_distillation,
    linear_distillation_eager,
)
from tightfit.levers.policy import loss_chunks

Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
SHAPES = ((16384, 2048, 4096, 128256), (8192, 4096, 4096, 128256))
"""Rows, student and teacher widths, vocabulary."""
TERMS = DistillationTerms(alpha=0.5, temperature=2.0)
ERROR_ROWS = 2048
"""Rows of the gradient that are compared with float64."""


def losses() -> dict[str, Loss]:
    """Implementations by name."""
    made: dict[str, Loss] = {}
    for divergence in DIVERGENCES:
        terms = replace(TERMS, divergence=divergence)
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


def counted_bytes(parts: list[Tensor]) -> int:
    """What our loss should hold at its peak beside its inputs: in forward, or in backward where it casts its sum."""
    (rows, width), columns = parts[0].shape, len(parts[1])
    size = parts[0].element_size()
    chunks = loss_chunks.distillation_chunks(
        rows, columns, width, size, CHUNK_BYTES, narrow=parts[0].dtype == torch.bfloat16
    )
    hidden_bytes, sum_bytes = rows * width * size, chunks.sum_bytes * columns * width
    cast_bytes = columns * width * size if chunks.sum_bytes == 4 else 0
    return sum_bytes + hidden_bytes + max(chunks.held_bytes, hidden_bytes + cast_bytes)


def true_gradient(parts: list[Tensor], terms: DistillationTerms) -> Tensor:
    """The first rows of the gradient of the student's projection in float64, some rows of the batch at a time."""
    weight, teacher = parts[1].detach().double().requires_grad_(), parts[3].double()
    total = torch.zeros_like(weight[:ERROR_ROWS], requires_grad=False)
    for at in torch.arange(len(parts[0]), device=weight.device).split(128):
        h, g = parts[0].detach()[at].double(), parts[2][at].double()
        loss = linear_distillation_eager(h, weight, g, teacher, parts[4][at], terms).sum()
        total += torch.autograd.grad(loss, weight)[0][:ERROR_ROWS]
    return total.detach()


def unexplained(found: Tensor, basis: list[Tensor]) -> float:
    """‖found − its nearest combination of `basis`‖ / ‖found‖."""
    found, columns = found.double().flatten(), torch.stack([x.flatten() for x in basis], dim=1)
    factors = torch.linalg.solve(columns.T @ columns, columns.T @ found)
    return float((found - columns @ factors).norm() / found.norm())


def print_errors(made: dict[str, Loss], parts: list[Tensor]) -> None:
    """How wrong each weight gradient is, and how wrong float64's own is once rounded to the same dtype."""
    entropy = true_gradient(parts, replace(TERMS, alpha=0.0))
    taught = {d: true_gradient(parts, replace(TERMS, alpha=1.0, divergence=d)) for d in DIVERGENCES}
    for name, loss in made.items():
        for x in parts[:2]:
            x.grad = None
        try:
            loss(*parts).backward()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            continue
        assert parts[1].grad is not None
        basis = [entropy, taught[next(d for d in DIVERGENCES if name.endswith(d))]]
        rounded = (TERMS.alpha * basis[1] + (1 - TERMS.alpha) * basis[0]).to(parts[1].dtype)
        errors = unexplained(parts[1].grad[:ERROR_ROWS], basis), unexplained(rounded, basis)
        print(f"{name}: weight gradient wrong by {errors[0]:.3e}, rounding alone {errors[1]:.3e}", flush=True)


def made_inputs(shape: tuple[int, int, int, int], device: str) -> list[Tensor]:
    """Hidden states and projections of student and teacher, and labels; the student's have gradients."""
    rows, width, teacher_width, vocabulary = shape
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = (rows, width), (vocabulary, width), (rows, teacher_width), (vocabulary, teacher_width)
    parts = [(torch.randn(size, device=device) / size[1] ** 0.5).to(dtype) for size in shapes]
    for x in parts[:2]:
        x.requires_grad_()
    return [*parts, torch.randint(0, vocabulary, (rows,), device=device)]


def measured_row(loss: Loss, name: str, parts: list[Tensor], ideal: float, repeats: int) -> dict[str, Any]:
    """The row of one loss; NaN and -1 where it ran out of memory."""
    try:
        ms, peak_bytes = measure(loss, parts, repeats)
    except torch.OutOfMemoryError:
        ms, peak_bytes = float("nan"), -1
        torch.cuda.empty_cache()
    return {
        "loss": name,
        "rows": len(parts[0]),
        "width": parts[0].shape[1],
        "teacher_width": parts[2].shape[1],
        "vocabulary": len(parts[1]),
        "ms": round(ms, 2),
        "ideal_ms": round(ideal, 2),
        "peak_gib": round(peak_bytes / 2**30, 3),
    }


def parsed() -> argparse.Namespace:
    """What was asked for; sizes of buffers are set."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small shapes, and no rows written")
    parser.add_argument("--errors", action="store_true", help="also compare weight gradients with float64")
    parser.add_argument("--only", default="", help="losses whose name contains this")
    parser.add_argument("--taught-rows", type=int, default=loss_chunks.TAUGHT_ROWS)
    parser.add_argument("--product-mib", type=int, default=loss_chunks.SPLIT_PRODUCT_BYTES >> 20)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    chosen = parser.parse_args()
    usual = loss_chunks.TAUGHT_ROWS, loss_chunks.SPLIT_PRODUCT_BYTES
    loss_chunks.TAUGHT_ROWS, loss_chunks.SPLIT_PRODUCT_BYTES = chosen.taught_rows, chosen.product_mib << 20
    chosen.writes = not chosen.tiny and usual == (loss_chunks.TAUGHT_ROWS, loss_chunks.SPLIT_PRODUCT_BYTES)
    return chosen


def main() -> None:
    chosen = parsed()
    made = {name: loss for name, loss in losses().items() if chosen.only in name}
    for shape in ((64, 32, 48, 500),) if chosen.tiny else SHAPES:
        parts = made_inputs(shape, chosen.device)
        ideal = ideal_ms(parts, chosen.repeats)
        print(f"counted for ours: {counted_bytes(parts) / 2**30:.3f} GiB", flush=True)
        for name, loss in made.items():
            row = measured_row(loss, name, parts, ideal, chosen.repeats)
            print(row, flush=True)
            if chosen.writes:
                append_row("distill_loss", row, folder=chosen.results, commit=chosen.commit)
        if chosen.errors:
            print_errors(made, parts)


if __name__ == "__main__":
    main()
