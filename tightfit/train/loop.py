"""The training loop: prepare, step, evaluate, save, and leave a run that can be resumed bit-exactly.

A kill leaves the last checkpoint; SIGINT or SIGTERM finishes the step, saves and stops. A loss that is not finite stops
the run before the weights are touched. The loop decides when; `step.py`, `evaluation.py`, `checkpoint.py` know how.
Of several ranks all run this loop in step; the first one alone prints, logs and writes, and a request to stop that any
of them gets stops all of them after the same step.
"""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from tightfit.errors import UserError
from tightfit.hardware.cpu import peak_resident_bytes
from tightfit.jobs.job import Job
from tightfit.jobs.workload import Workload
from tightfit.memory.ledger import Phase
from tightfit.models.generate import Sampling, continue_text
from tightfit.models.loading import LoadedModel, load_model
from tightfit.parallel.apply import refuse_what_cannot_run
from tightfit.parallel.mesh import init_distributed
from tightfit.parallel.ranks import Ranks
from tightfit.train.checkpoints.directory import (
    Position,
    checkpoint_path,
    gathered,
    latest_checkpoint,
    save_checkpoint,
    what_is_safe,
)
from tightfit.train.checkpoints.sharded import ShardedSaver
from tightfit.train.data.loader import evaluation_batches
from tightfit.train.evaluation import Evaluation, evaluate
from tightfit.train.metrics import MetricsLog, read_metrics
from tightfit.train.out_of_memory import Running, RunOutOfMemoryError, shortage_of
from tightfit.train.pipeline_record import recorded
from tightfit.train.precision import COMPUTE_DTYPES, choose_device
from tightfit.train.preparation import Prepared, claim_output, prepare
from tightfit.train.progress import RunProgress
from tightfit.train.schedule import lr_ratio
from tightfit.train.step import Batch, NotFiniteError, StepResult, train_step

SAME_REQUEST_S = 2.0
"""Within this, signals that ask to stop are one request."""


@dataclass
class RunResult:
    """How a run went, for the summary, `--json` and the pictures."""

    run: Path
    checkpoint: Path
    step: int
    steps: int
    params: int
    device: str
    precision: str
    start: Evaluation | None
    end: Evaluation | None
    tokens_per_second: float
    train_seconds: float
    peak_bytes: int
    rank: int = 0
    """The first rank's result is the run's; the others' is for themselves."""
    samples: list[tuple[str, str]] = field(default_factory=list)
    stopped_by: int | None = None
    """The signal that asked the run to stop early."""


@dataclass
class Pace:
    """Tokens and seconds spent in training steps alone, without evaluation and saving."""

    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> float:
        """Count one step; returns its tokens per second."""
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        return tokens / seconds

    @property
    def tokens_per_second(self) -> float:
        """Average over the run so far."""
        return self.tokens / self.seconds if self.seconds else 0.0


def run_job(
    job: Job, *, resume: bool = False, overwrite: bool = False, stop_after: int | None = None, quiet: bool = False
) -> RunResult:
    """Train as `job` says, as one of its ranks, and return how it went."""
    refuse_what_cannot_run(job.layout, job.levers)
    with init_distributed(job.layout, choose_device(job.device)) as (mesh, device):
        ranks = Ranks.of(mesh)
        quiet = quiet or not ranks.first
        checkpoint = latest_checkpoint(job.output) if resume and ranks.first else None
        if ranks.first:
            claim_output(job, resuming=checkpoint is not None, overwrite=overwrite)
        checkpoint = ranks.broadcast(checkpoint)
        with RunProgress(0, 0, quiet) as notes:
            prepared = prepare(job, checkpoint, notes.say, show_bars=not quiet, device=device, mesh=mesh)
        last_step = min(prepared.total_steps, stop_after or prepared.total_steps)
        return _Run(prepared, last_step, quiet).go()


class _Run:
    """The state of one pass through the loop."""

    def __init__(self, prepared: Prepared, last_step: int, quiet: bool) -> None:
        self.p, self.job, self.last_step = prepared, prepared.job, last_step
        self.ranks = prepared.ranks
        self.step, self.pace = prepared.position_step, Pace()
        self.start = _evaluation_at_start(self.job.output) if self.step else None
        self.end: Evaluation | None = None
        self.asked_by: int | None = None
        """The signal that this rank was sent; `stopped_by` is what all ranks have agreed on."""
        self.stopped_by: int | None = None
        self.quiet = quiet
        self.phase: Phase = "forward"
        self.saved: Path | None = prepared.checkpoint
        sharded = self.job.saving.sharded and self.ranks.processes > 1
        self.saver = ShardedSaver(self.ranks) if sharded else None

    def go(self) -> RunResult:
        """Evaluate, train to the last step, evaluate again, save, sample."""
        p = self.p
        with (
            self._metrics_log() as self.metrics,
            RunProgress(p.total_steps, self.step, self.quiet) as self.progress,
            _stop_signals(self),
        ):
            if self.step == 0:
                self.start = self._evaluate()
            self._train()
            self.end = self._evaluate() if self.end is None else self.end
            if self.saved is None or self.saved.name != f"step-{self.step:08d}":
                self._save()
            if self.saver is not None:
                self.saver.finish()
        return self._result()

    def _metrics_log(self) -> AbstractContextManager[MetricsLog | None]:
        if not self.ranks.first:
            return nullcontext()
        return MetricsLog(self.job.output, self.step, self.job.logging.tensorboard)

    def _log(self, **values: Any) -> None:
        if self.metrics is not None:
            self.metrics.add(self.step, **values)

    def _train(self) -> None:
        batches = iter(self.p.loader)
        while self.step < self.last_step and not self._asked_to_stop():
            began = time.perf_counter()
            micro_batches = list(islice(batches, self.job.accumulation))
            lr = self.job.optimizer.lr * lr_ratio(self.job.schedule, self.step, self.p.total_steps)
            result = self._take_step(micro_batches, lr)
            self.step += 1
            tokens = sum(b["tokens"].numel() for b in micro_batches) * self.ranks.world
            self._after_step(result, lr, self.pace.add(tokens, time.perf_counter() - began))

    def _asked_to_stop(self) -> bool:
        """Whether any rank was; all of them then say so before the same step."""
        self.stopped_by = self.ranks.max(self.asked_by or 0) or None
        return self.stopped_by is not None

    def _take_step(self, micro_batches: list[Batch], lr: float) -> StepResult:
        p = self.p
        try:
            with recorded(p.module, self.step + 1, self.ranks, self.job.output):
                return train_step(
                    p.module, p.optimizer, micro_batches, p.device, lr, p.scale, self._in_phase, ranks=self.ranks
                )
        except NotFiniteError as error:
            when = (
                "in which weights were changed already;" if error.weights_changed else "before the weights changed and"
            )
            raise UserError(
                f"step {self.step + 1}: {error}; training stopped {when} "
                f"{what_is_safe(self.job.output)}; lower optimizer.lr (now {self.job.optimizer.lr:g}) or warm up longer"
            ) from None
        except torch.OutOfMemoryError as error:
            workload = Workload.of_job(self.job, p.model.spec, p.precision)
            running = Running(self.job, workload, p.model, p.optimizer, p.device)
            safe = what_is_safe(self.job.output)
            raise RunOutOfMemoryError(shortage_of(error, running, self.step + 1, self.phase, safe)) from None

    def _in_phase(self, phase: Phase) -> None:
        self.phase = phase

    def _after_step(self, result: StepResult, lr: float, rate: float) -> None:
        job, ends = self.job, self.step >= self.last_step
        memory = peak_memory_bytes(self.p.device)
        if self.saver is not None:
            self.saver.poll()
        if self.step % job.logging.every == 0 or ends:
            self._log(
                loss=result.loss, gradient_norm=_finite(result.gradient_norm), lr=lr, tokens=result.tokens,
                tokens_per_second=rate, peak_bytes=memory, skipped=result.skipped,
            )  # fmt: skip
        self.progress.update(self.step, result.loss, rate, memory)
        self.end = None
        if job.evaluation.every and (self.step % job.evaluation.every == 0 or ends):
            self.end = self._evaluate()
        if job.saving.every and self.step % job.saving.every == 0:
            self._save()

    def _evaluate(self) -> Evaluation | None:
        p, rows = self.p, self.job.layout.micro_batch
        if p.held_out is None:
            return None
        batches = evaluation_batches(p.held_out, rows, rank=self.ranks.rank, world=self.ranks.world)
        found = evaluate(p.evaluated, batches, p.device, self.ranks)
        self._log(held_out_loss=found.loss, held_out_perplexity=found.perplexity)
        self.progress.say(f"step {self.step}: held-out loss {found.loss:.4f}, perplexity {found.perplexity:.2f}")
        return found

    def _save(self) -> None:
        p = self.p
        position = Position(
            step=self.step, loader=p.loader.state_dict(), loss_scale=asdict(p.scale),
            job=self.job.model_dump(mode="json"), facts=p.facts,
        )  # fmt: skip
        keep, dtype = self.job.saving.keep, COMPUTE_DTYPES[p.precision]
        self.saved = checkpoint_path(self.job.output, self.step)
        if self.saver is not None:
            return self.saver.save(self.job.output, p.model, p.optimizer, dtype, p.tokenizer, position, keep)
        content = gathered(p.model, p.optimizer, dtype, self.ranks)
        if self.ranks.first:
            save_checkpoint(self.job.output, content, p.tokenizer, position, keep)
        self.ranks.barrier()

    def _result(self) -> RunResult:
        p = self.p
        assert self.saved is not None
        return RunResult(
            run=self.job.output, checkpoint=self.saved, step=self.step, steps=p.total_steps,
            params=p.model.spec.params(), device=device_name(p.device), precision=p.precision,
            start=self.start, end=self.end,
            tokens_per_second=self.pace.tokens_per_second, train_seconds=self.pace.seconds,
            peak_bytes=peak_memory_bytes(p.device), rank=self.ranks.process,
            samples=self._samples(), stopped_by=self.stopped_by,
        )  # fmt: skip

    def _samples(self) -> list[tuple[str, str]]:
        """What the model says to the job's prompts; shards are read back from the checkpoint, whole."""
        p, settings = self.p, self.job.evaluation
        if self.stopped_by is not None or not self.ranks.first or not settings.prompts:
            return []
        loaded = LoadedModel(p.model, p.tokenizer, str(self.job.output))
        if not p.optimizer.is_whole:
            loaded = load_model(str(self.saved), device=p.device, dtype=COMPUTE_DTYPES[p.precision])
        sampling = Sampling(max_tokens=settings.sample_tokens, temperature=settings.temperature, seed=self.job.seed)
        return [(prompt, "".join(next(iter(continue_text(loaded, prompt, sampling))))) for prompt in settings.prompts]


def peak_memory_bytes(device: torch.device) -> int:
    """Peak of allocated GPU memory, or of the process's resident memory on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()


def device_name(device: torch.device) -> str:
    """The GPU's name, or how many CPU threads there are."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def _finite(value: float) -> float | None:
    """JSON has no NaN or infinity."""
    return value if math.isfinite(value) else None


def _evaluation_at_start(run: Path) -> Evaluation | None:
    """The first held-out loss of a run that is being resumed."""
    rows = read_metrics(run / "metrics.jsonl")
    losses = [row["held_out_loss"] for row in rows if "held_out_loss" in row and row["step"] == 0]
    return Evaluation(losses[0], 0) if losses else None


@contextmanager
def _stop_signals(run: _Run) -> Iterator[None]:
    """SIGINT and SIGTERM let the current step finish; another one interrupts at once.

    Those that follow closely are the same request: Slurm asks all processes, and who started a rank passes it on.
    """
    began = 0.0

    def ask(number: int, _: object) -> None:
        nonlocal began
        if run.asked_by is not None and time.monotonic() - began < SAME_REQUEST_S:
            return
        if run.asked_by is not None:
            raise KeyboardInterrupt
        began = time.monotonic()
        run.asked_by = number  # of its own: while ranks agree on the last step's, this one must not be lost
        run.progress.say(f"{signal.Signals(number).name}: finishing the step and saving; once more stops at once")

    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
