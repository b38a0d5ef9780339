"""Weights and states on the host: our ZeRO-3 beside DeepSpeed's (ZeRO-Infinity), same decoder, rows and ranks.

Each engine trains in processes of its own, one after the other, from the same weights and on the same random tokens;
losses must agree within rounding at every step (DeepSpeed makes its float32 masters from weights that bf16 has rounded
already, hence the wider bound there). Written to benchmarks/results/offload_peers.csv: seconds of a step (median, after
the first ones), the allocator's peak on a GPU, and how far a rank's resident memory grew, which on CPUs is everything.
Of two CPU processes only ratios mean anything. On one GPU there is one rank, whose weights are not sharded: ours are
streamed layer by layer, DeepSpeed's are ZeRO-3 of one.

    python -m benchmarks.offload_peers --ranks 2 --model tiny-llama --length 64 --dry-run     two CPU processes
    python -m benchmarks.offload_peers --model llama-3.2-1b --length 4096 --precision bf16    one GPU
"""

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks.rows import append_row
from tightfit.errors import UserError
from tightfit.jobs.job import Job, PrecisionName
from tightfit.launch.together import run_together
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.resolve import resolve_spec
from tightfit.models.spec import ModelSpec
from tightfit.parallel.mesh import make_mesh
from tightfit.parallel.ranks import ALONE, Ranks
from tightfit.train.assembly import assemble, unfilled
from tightfit.train.deepspeed_engine import deepspeed_assembled
from tightfit.train.optimizer.adamw import MasterAdamW
from tightfit.train.precision import LossScale
from tightfit.train.step import Batch, train_step

ENGINES = ("tightfit", "deepspeed")
LR, WARM_UP, GIB = 1e-4, 2, 2**30
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}


@dataclass(frozen=True)
class Case:
    """What both engines train."""

    model: str
    sequence_length: int
    rows: int
    """Of each rank."""
    ranks: int
    precision: PrecisionName
    steps: int


@dataclass(frozen=True)
class Found:
    """What one engine took: losses of all steps, and the rest of the first rank."""

    losses: tuple[float, ...]
    step_s: float
    gpu_bytes: int
    grown_bytes: int


def job_of(case: Case, engine: str) -> Job:
    """All on the host; ZeRO-3 where there are ranks to shard over."""
    layout = {"data": case.ranks, "zero": 3 if case.ranks > 1 else 0, "micro_batch": case.rows}
    levers = {"offload": "weights", "checkpoint_every": 1}
    fields: dict[str, Any] = {
        "model": case.model,
        "data": {"train": "stdlib", "sequence_length": case.sequence_length},
        "output": "-",
    }
    fields |= {"global_batch": case.rows * case.ranks, "steps": case.steps, "precision": case.precision}
    return Job.model_validate({**fields, "engine": engine, "layout": layout, "levers": levers, "optimizer": {"lr": LR}})


def fill(model: Decoder) -> None:
    """The same weights for both."""
    torch.manual_seed(0)
    init_weights(model)


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _built(case: Case, engine: str, spec: ModelSpec, device: torch.device) -> tuple[nn.Module, MasterAdamW, Ranks]:
    job = job_of(case, engine)
    mesh = make_mesh(job.layout, device.type) if case.ranks > 1 else None
    ranks = ALONE if mesh is None else Ranks.of(mesh)
    if engine == "deepspeed":
        _, module, optimizer = deepspeed_assembled(job, spec, device, case.precision, fill)
        return module, optimizer, ranks
    model = unfilled(spec, job.layout, case.precision, device, job.levers)
    parts = (model, mesh, job.layout, job.levers, case.precision, job.optimizer, device, fill)
    return *assemble(*parts), ranks


def _batch(case: Case, spec: ModelSpec, step: int, rank: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(spec.vocab_size, (case.rows, case.sequence_length), generator=generator)
    return {"tokens": tokens, "labels": tokens}


def measure(device: torch.device, case: Case, engine: str) -> Found:
    """One engine as a rank of a running group."""
    before, spec = _resident_bytes(), resolve_spec(case.model)
    spec = replace(spec, max_positions=max(spec.max_positions, case.sequence_length))
    module, optimizer, ranks = _built(case, engine, spec, device)
    scale, losses, seconds = LossScale.for_precision(case.precision), [], []
    for step in range(WARM_UP + case.steps):
        began = time.perf_counter()
        batch = _batch(case, spec, step, ranks.rank)
        losses.append(train_step(module, optimizer, [batch], device, LR, scale, ranks=ranks).loss)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return Found(tuple(losses), statistics.median(seconds[WARM_UP:]), peak_bytes, _resident_bytes() - before)


def compare(case: Case, run: Callable[..., Found] = run_together) -> dict[str, Found]:
    """Both engines, whose losses must be the same."""
    found = {engine: run(case.ranks, measure, case, engine) for engine in ENGINES}
    for step, losses in enumerate(zip(*(each.losses for each in found.values()), strict=True), 1):
        if abs(losses[0] - losses[1]) > TOLERANCES[case.precision] * abs(losses[1]):
            raise UserError(f"step {step}: the losses are {losses[0]:.6f} and {losses[1]:.6f}, so times mean nothing")
    return found


def row_of(case: Case, found: dict[str, Found]) -> dict[str, str]:
    """Of the results' table."""
    ours, theirs = (found[engine] for engine in ENGINES)
    row = {name: str(value) for name, value in asdict(case).items()}
    for engine, each in found.items():
        row |= {f"{engine}_step_ms": f"{1e3 * each.step_s:.1f}", f"{engine}_gpu_gib": f"{each.gpu_bytes / GIB:.3f}"}
        row |= {f"{engine}_host_gib": f"{each.grown_bytes / GIB:.3f}", f"{engine}_loss": f"{each.losses[-1]:.6f}"}
    return row | {"time_ratio": f"{theirs.step_s / ours.step_s:.2f}"}


def main() -> None:
    """Compare, print and, unless told otherwise, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--precision", choices=tuple(TOLERANCES), default="fp32")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true", help="print, and write nothing")
    chosen = parser.parse_args()
    case = Case(chosen.model, chosen.length, chosen.rows, chosen.ranks, chosen.precision, chosen.steps)
    row = row_of(case, compare(case))
    print(", ".join(f"{name} {value}" for name, value in row.items()))
    if not chosen.dry_run:
        append_row("offload_peers", row)


if __name__ == "__main__":
    main()
