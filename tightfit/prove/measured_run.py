"""A measured run: a few real steps of a job with memory measurement, and their ledger.

Data, model, levers and parallelism are as in training; nothing is saved, so a run's directory gets a `ledger.json` and
no checkpoint. One evaluation follows the steps where there is held-out data. Tokenizing and batching are not counted.
Of several ranks each measures itself and the first one's ledger is kept: data ranks take equal memory.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tightfit.durable import durable_file, refuse_unwritable
from tightfit.errors import UserError
from tightfit.jobs.job import Job
from tightfit.memory.ledger import Ledger
from tightfit.memory.measurement import Measuring, measured
from tightfit.memory.trace import Allocation, largest_alive
from tightfit.parallel.mesh import init_distributed
from tightfit.parallel.ranks import Ranks
from tightfit.prove.rehearsal import claim_tensors
from tightfit.train.data.loader import evaluation_batches
from tightfit.train.evaluation import evaluate
from tightfit.train.loop import device_name
from tightfit.train.precision import choose_device
from tightfit.train.preparation import Prepared, prepare
from tightfit.train.progress import RunProgress
from tightfit.train.schedule import lr_ratio
from tightfit.train.step import Batch, NotFiniteError, train_step

LEDGER_FILE = "ledger.json"
LARGEST_KINDS = 12


@dataclass(frozen=True)
class MeasuredRun:
    """The result; `largest` has the kinds of allocations that take most at the peak, each with their number."""

    run: Path
    device: str
    precision: str
    params: int
    losses: list[float]
    ledger: Ledger
    largest: list[tuple[Allocation, int]]
    measuring: Measuring
    rank: int = 0

    def to_json(self) -> dict[str, Any]:
        """As plain data; the ledger's own fields are at the top, so that this is a ledger file."""
        place = self.ledger.lines[0].place
        return {
            **self.ledger.to_json(),
            "device": self.device,
            "precision": self.precision,
            "params": self.params,
            "steps": len(self.losses),
            "losses": self.losses,
            "peak_allocated_bytes": self.ledger.peak_allocated_bytes(place),
            "peak_reserved_bytes": self.ledger.peak_reserved_bytes(place),
            "largest": [{**asdict(kind), "count": count} for kind, count in self.largest],
        }

    def save(self) -> Path:
        """Write the ledger into the run's directory."""
        target = self.run / LEDGER_FILE
        try:
            with durable_file(target) as file:
                file.write_text(json.dumps(self.to_json(), indent=1), encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write output {self.run}: {error.strerror}; choose a writable directory") from error
        return target


def measure_job(job: Job, steps: int, *, quiet: bool = False) -> MeasuredRun:
    """Run `steps` steps of `job` as one of its ranks, and measure memory."""
    if sentence := job.refusal():
        raise UserError(sentence)
    refuse_unwritable(job.output, job.output)
    if job.engine != "tightfit":
        raise UserError(f"engine is {job.engine}, whose tensors cannot be told apart; measure with -o engine=tightfit")
    with init_distributed(job.layout, choose_device(job.device)) as (mesh, device):
        try:
            return _measured(job, steps, device, mesh, quiet=quiet or not Ranks.of(mesh).first)
        except torch.OutOfMemoryError:
            raise UserError(
                "the GPU ran out of memory before it could be measured; lower layout.micro_batch "
                f"(now {job.layout.micro_batch}) or set levers.checkpoint_every=1"
            ) from None


def _measured(job: Job, steps: int, device: torch.device, mesh: DeviceMesh | None, *, quiet: bool) -> MeasuredRun:
    with measured(device) as measuring:
        measuring.tracer.begin("init")
        with RunProgress(0, 0, quiet) as notes:
            prepared = prepare(job, None, notes.say, show_bars=False, device=device, mesh=mesh)
        _claim_tensors(measuring, prepared)
        losses = _steps(measuring, prepared, steps)
        _evaluate(measuring, prepared)
    return MeasuredRun(
        run=job.output,
        device=device_name(device),
        precision=prepared.precision,
        params=prepared.model.spec.params(),
        losses=losses,
        ledger=measuring.ledger(),
        largest=list(largest_alive(measuring.fullest, LARGEST_KINDS)),
        measuring=measuring,
        rank=prepared.ranks.process,
    )


def _claim_tensors(measuring: Measuring, prepared: Prepared) -> None:
    """Tell the tracer which tensors are weights, states, gradients and inputs."""
    tracer, optimizer = measuring.tracer, prepared.optimizer
    claim_tensors(tracer, prepared.model, optimizer, period=max(1, prepared.job.levers.checkpoint_every))
    counters = (count for bucket in optimizer.buckets for count in bucket.updater.counters())
    tracer.claim(counters, "optimizer states", "step counters")

    def claim_inputs(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        tracer.claim((each for each in (*arguments, *options.values()) if isinstance(each, torch.Tensor)), "inputs")

    prepared.model.register_forward_pre_hook(claim_inputs, with_kwargs=True)


def _steps(measuring: Measuring, p: Prepared, steps: int) -> list[float]:
    rows, losses = iter(p.loader), []
    for step in range(steps):
        micro_batches = _fetched(measuring, islice(rows, p.job.accumulation))
        lr = p.job.optimizer.lr * lr_ratio(p.job.schedule, step, max(p.total_steps, steps))
        try:
            with measuring.step():
                result = train_step(
                    p.module, p.optimizer, micro_batches, p.device, lr, p.scale, measuring.tracer.begin, ranks=p.ranks
                )
        except NotFiniteError as error:
            raise UserError(f"step {step + 1}: {error}; lower optimizer.lr (now {p.job.optimizer.lr:g})") from None
        losses.append(result.loss)
    return losses


def _fetched(measuring: Measuring, batches: Iterable[Batch]) -> list[Batch]:
    """Batches from the loader, whose own memory is not counted."""
    with measuring.tracer.pause():
        found = list(batches)
    if measuring.device.type != "cuda":
        for batch in found:
            measuring.tracer.claim(batch.values(), "inputs")
    return found


def _evaluate(measuring: Measuring, p: Prepared) -> None:
    """Evaluate one micro-batch of held-out data; more would take the same memory."""
    if p.held_out is None:
        return
    batches = evaluation_batches(p.held_out, p.job.layout.micro_batch, rank=p.ranks.rank, world=p.ranks.world)
    found = _fetched(measuring, islice(batches, 1))
    measuring.tracer.begin("evaluation")
    evaluate(p.evaluated, found, p.device, p.ranks)
