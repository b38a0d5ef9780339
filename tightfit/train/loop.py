"""The training loop: prepare, step, save, evaluate, and leave a run that can be resumed bit-exactly.

A kill leaves the last checkpoint; SIGINT, SIGTERM or SIGHUP finishes the step, saves and stops. A loss that is not
finite stops the run before the weights are touched. The loop decides when; `step.py`, `evaluation.py`, `checkpoints/`
know how. Nothing is written before all is prepared (`run_directory.py`). All ranks run this loop in lockstep; the first
rank alone prints, logs and writes, and a stop request to any rank stops all of them after the same step. A pipeline
that is not flushed between steps reports a step when the next one has been taken; it is flushed before a checkpoint, an
evaluation, the step that is recorded and the end, and its ranks agree to stop one step later.
"""

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Literal

import torch

from tightfit.errors import UserError
from tightfit.jobs.job import Job
from tightfit.jobs.paths import with_absolute_paths
from tightfit.jobs.workload import Workload
from tightfit.memory.ledger import Phase
from tightfit.models.generate import Sampling, continue_text
from tightfit.models.loading import LoadedModel, load_model
from tightfit.parallel.mesh import init_distributed
from tightfit.parallel.ranks import LateMax, Ranks
from tightfit.plan.mfu import token_flops
from tightfit.train.checkpoints.directory import (
    Position,
    checkpoint_path,
    gathered,
    last_checkpoint_sentence,
    save_checkpoint,
)
from tightfit.train.checkpoints.sharded import ShardedSaver
from tightfit.train.data.loader import evaluation_batches
from tightfit.train.distillation import teacher_spec
from tightfit.train.evaluation import Evaluation, evaluate
from tightfit.train.expert_load import ExpertMeter, LayerLoad
from tightfit.train.frozen_base import saved_adapter
from tightfit.train.metrics import METRICS_FILE, MetricsLog, SideFiles, read_metrics
from tightfit.train.out_of_memory import Running, RunOutOfMemoryError, shortage_of
from tightfit.train.pace import Pace, peak_flops
from tightfit.train.peak_memory import forget_peak_memory, peak_memory_bytes
from tightfit.train.pipeline_record import is_recorded, recorded
from tightfit.train.precision import COMPUTE_DTYPES, choose_device
from tightfit.train.preparation import Prepared, prepare
from tightfit.train.progress import RunProgress
from tightfit.train.quantized_result import quantized_parts, write_quantized
from tightfit.train.run_directory import Decision, OpenedRun, Start, decide, opened, recover
from tightfit.train.schedule import lr_ratio
from tightfit.train.segments import use_expandable_segments
from tightfit.train.short_collections import short_collections
from tightfit.train.step import Batch, NotFiniteError, StepResult, train_step
from tightfit.train.stopping import StopRequest
from tightfit.train.trackers import open_trackers


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
    """Over the steps after the warm-up."""
    train_seconds: float
    peak_bytes: int
    warmup_steps: int = 0
    warmup_seconds: float = 0.0
    mfu: float | None = None
    """Model FLOPs per second as a share of what the card's data sheet promises; None on cards that are not known."""
    rank: int = 0
    """The process that this result is of; the summary is made of the first one's."""
    samples: list[tuple[str, str]] = field(default_factory=list)
    stopped_by: int | None = None
    """The signal that asked the run to stop early."""
    stopped_early: bool = False
    """Whether the held-out loss had stopped falling (`evaluation.stop_early`)."""
    expert_load: tuple[LayerLoad, ...] = ()
    """One of every routed layer, over the steps of this run."""


def run_job(
    job: Job,
    *,
    resume: bool | Literal["auto"] = False,
    overwrite: bool = False,
    checkpoint: str | None = None,
    stop_after: int | None = None,
    quiet: bool = False,
) -> RunResult:
    """Train as `job` says, as one of its ranks, and return how it went.

    `resume` goes on from the newest checkpoint, or from the one named `checkpoint`; "auto" begins anew without one.
    """
    job, start = with_absolute_paths(job), Start(resume=resume, overwrite=overwrite, checkpoint=checkpoint)
    if sentence := job.refusal():
        raise UserError(sentence)
    with init_distributed(job.layout, choose_device(job.device)) as (mesh, device), ExitStack() as stack:
        use_expandable_segments(job.layout, device)
        forget_peak_memory(device)
        ranks = Ranks.of(mesh)
        quiet = quiet or not ranks.first
        decision = ranks.on_first(lambda: _decided(job.output, start))
        with RunProgress(0, 0, quiet) as notes:
            prepared = prepare(
                job,
                decision.checkpoint,
                notes.say,
                show_bars=not quiet,
                device=device,
                mesh=mesh,
                saves=True,
                replaces=decision.replaces,
            )
            last_step = _last_step(prepared, stop_after)
            if finished := prepared.position_step == prepared.total_steps:
                notes.say(
                    f"{job.output} is finished: {prepared.total_steps} of {prepared.total_steps} steps; "
                    f"give -o {'epochs' if job.steps is None else 'steps'}=MORE to train it further"
                )
        run = None if finished else _begun(ranks, stack, opened(job, decision, start))
        return _Run(prepared, run, last_step, quiet, writes=not finished).go()


def _decided(output: Path, start: Start) -> Decision:
    recover(output)
    return decide(output, start)


def _begun(ranks: Ranks, stack: ExitStack, run: AbstractContextManager[OpenedRun]) -> OpenedRun | None:
    """The run's directory, opened on the first process (None on the others); where that is refused, all ranks raise."""
    entered: list[OpenedRun] = []

    def enter() -> Decision:
        entered.append(stack.enter_context(run))
        return entered[0].decision

    ranks.on_first(enter)
    return entered[0] if entered else None


def _last_step(prepared: Prepared, stop_after: int | None) -> int:
    if stop_after is not None and stop_after < prepared.position_step:
        raise UserError(
            f"--stop-after is {stop_after}, but {prepared.checkpoint} has {prepared.position_step} steps already; "
            "give a later step"
        )
    return min(prepared.total_steps, stop_after or prepared.total_steps)


@dataclass(frozen=True)
class _TakenStep:
    """A step that was taken and not reported yet; `rate` is its tokens per second."""

    step: int
    lr: float
    rate: float


class _Run:
    """The state of one pass through the loop."""

    def __init__(
        self, prepared: Prepared, opened_run: OpenedRun | None, last_step: int, quiet: bool, *, writes: bool
    ) -> None:
        self.p, self.job, self.last_step, self.writes = prepared, prepared.job, last_step, writes
        self.opened_run = opened_run
        """The run's directory, on the first rank."""
        self.ranks = prepared.ranks
        self.experts = ExpertMeter(prepared.model, prepared.ranks)
        self.step, self.pace = prepared.position_step, Pace()
        self.losses = self.ranks.broadcast(_held_out_losses(self.job.output, self.step)) if self.step else {}
        self.start = Evaluation(self.losses[0], 0) if 0 in self.losses else None
        self.end: Evaluation | None = None
        self.stopped_by: int | None = None
        """The signal that all ranks have agreed on; a rank's own is in its `request`."""
        self.untold: deque[_TakenStep] = deque()
        self.agreed_max = self.ranks.max if prepared.optimizer.buffered is None else LateMax(self.ranks)
        self.quiet = quiet
        self.phase: Phase = "forward"
        self.saved: Path | None = prepared.checkpoint
        self.saver = ShardedSaver(self.ranks, self.job.layout) if self.job.saves_sharded else None

    def go(self) -> RunResult:
        """Evaluate, train to the last step, save, evaluate again, sample."""
        p = self.p
        with RunProgress(p.total_steps, self.step, self.quiet) as self.progress:
            self.side_files = SideFiles(self.progress.say)
            self.request = StopRequest(self.progress.say, lambda: last_checkpoint_sentence(self.job.output))
            with self._metrics_log() as self.metrics, self.request.heard():
                if self.step == 0:
                    self.start = self._evaluate()
                self._train()
                self._save_once()
                self._write_quantized()
                if self.stopped_by is None and self.end is None:
                    self.end = self._evaluate()
                if self.saver is not None:
                    self.saver.finish()
                    self._settle()
        return self._result()

    def _metrics_log(self) -> AbstractContextManager[MetricsLog | None]:
        if not self.ranks.first or not self.writes:
            return nullcontext()
        return MetricsLog(
            self.job.output, self.step, open_trackers(self.job, self.step, self.progress.say), self.side_files
        )

    def _log(self, step: int, **values: Any) -> None:
        if self.metrics is not None:
            self.metrics.add(step, **values)

    def _train(self) -> None:
        with short_collections(self.p.device):
            self._take_steps()
        self._flush()

    def _take_steps(self) -> None:
        batches = iter(self.p.loader)
        while self.step < self.last_step and not self._has_plateaued() and not self._asked_to_stop():
            began = time.perf_counter()
            micro_batches = list(islice(batches, self.job.accumulation))
            lr = self.job.optimizer.lr * lr_ratio(self.job.schedule, self.step, self.p.total_steps)
            result = self._take_step(micro_batches, lr)
            self.step += 1
            tokens = sum(b["tokens"].numel() for b in micro_batches) * self.ranks.world
            rate = self.pace.add(tokens, time.perf_counter() - began)
            self.untold.append(_TakenStep(self.step, lr, rate))
            self._after_step(result)

    def _asked_to_stop(self) -> bool:
        """Whether any rank got a stop signal; all ranks learn of it before the same step."""
        self.stopped_by = self.agreed_max(self.request.signal or 0) or None
        return self.stopped_by is not None

    def _has_plateaued(self) -> bool:
        """Whether the last `stop_early` evaluations found no lower loss than those before; the same on all ranks."""
        patience, losses = self.job.evaluation.stop_early, list(self.losses.values())
        return 0 < patience < len(losses) and min(losses[-patience:]) >= min(losses[:-patience])

    @property
    def _stopped_early(self) -> bool:
        """Whether the run has ended, with steps left, as its loss no longer fell."""
        return self.stopped_by is None and self.step < self.last_step

    def _take_step(self, micro_batches: list[Batch], lr: float) -> StepResult | None:
        """The result to report: this step's or, of a pipeline that is not flushed, that of the step before, if any."""
        p, buffered = self.p, self.p.optimizer.buffered
        if buffered is not None and not is_recorded(p.module, self.step + 1):
            with self._explained():
                return buffered.take(micro_batches, p.device, lr, self._in_phase, self.ranks)
        self._flush()
        with self._explained(), recorded(p.module, self.step + 1, self.ranks, self.job.output, self.side_files):
            return train_step(
                p.module,
                p.optimizer,
                micro_batches,
                p.device,
                lr,
                p.scale,
                self._in_phase,
                ranks=self.ranks,
                graph=p.graph,
            )

    def _flush(self) -> None:
        """Flush a pipeline that is not flushed between steps, and report its last step."""
        if (buffered := self.p.optimizer.buffered) is not None:
            with self._explained():
                result = buffered.finish(self._in_phase, self.ranks)
            if result is not None:
                self._tell(result)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn non-finite numbers and out-of-memory errors into a UserError of one sentence."""
        p, failed = self.p, self.untold[0].step if self.untold else self.step + 1
        try:
            yield
        except NotFiniteError as error:
            raise UserError(self._not_finite(error, failed)) from None
        except torch.OutOfMemoryError as error:
            workload = Workload.of_job(self.job, p.model.spec, p.precision, teacher_spec(self.job))
            running = Running(self.job, workload, p.model, p.optimizer, p.device)
            safe = last_checkpoint_sentence(self.job.output)
            raise RunOutOfMemoryError(shortage_of(error, running, failed, self.phase, safe)) from None

    def _not_finite(self, error: NotFiniteError, step: int) -> str:
        """The same step would fail again with the same settings: say what to change."""
        when = "in which weights were changed already;" if error.weights_changed else "before the weights changed and"
        lower = f"-o optimizer.lr={self.job.optimizer.lr / 2:g}"
        again = f"--resume {lower}" if self.saved is not None else f"{lower}, from the beginning,"
        return (
            f"step {step}: {error}; training stopped {when} {last_checkpoint_sentence(self.job.output)}; the same "
            f"settings would come to the same step: go on with {again} or a longer schedule.warmup_steps, and look for "
            "odd data"
        )

    def _in_phase(self, phase: Phase) -> None:
        self.phase = phase

    def _after_step(self, result: StepResult | None) -> None:
        job, ends = self.job, self.step >= self.last_step
        if self.opened_run is not None:
            self.opened_run.is_worth_keeping = True
        if self.saver is not None:
            self.saver.poll()
            self._settle()
        if result is not None:
            self._tell(result)
        self.end = None
        saves = ends or bool(job.saving.every and self.step % job.saving.every == 0)
        evaluates = bool(job.evaluation.every and (self.step % job.evaluation.every == 0 or ends))
        if saves or evaluates:
            self._flush()
        if saves:
            self._save_once()
        if evaluates:
            self.end = self._evaluate()

    def _tell(self, result: StepResult) -> None:
        """Report `result`, that of the oldest unreported step, to metrics and progress."""
        taken, memory = self.untold.popleft(), peak_memory_bytes(self.p.device)
        if taken.step % self.job.logging.every == 0 or taken.step >= self.last_step:
            experts = self.experts.take()
            self._log(
                taken.step,
                loss=result.loss,
                gradient_norm=_finite(result.gradient_norm),
                lr=taken.lr,
                tokens=result.tokens,
                tokens_per_second=taken.rate,
                peak_bytes=memory,
                skipped=result.skipped,
                **experts,
            )
        self.progress.update(taken.step, result.loss, taken.rate, memory)

    def _evaluate(self) -> Evaluation | None:
        """The held-out loss; None without held-out data, or where a stop is requested meanwhile."""
        p, rows = self.p, self.job.layout.micro_batch
        if p.held_out is None:
            return None
        self._release_graph()
        batches = evaluation_batches(p.held_out, rows, rank=self.ranks.rank, world=self.ranks.world)
        unasked = takewhile(lambda _: not self._asked_to_stop(), batches)  # a stopped run should save soon
        found = evaluate(p.evaluated, unasked, p.device, self.ranks)
        if self.stopped_by is not None:
            return None
        self.losses[self.step] = found.loss
        self._log(self.step, held_out_loss=found.loss, held_out_perplexity=found.perplexity)
        self.progress.say(f"step {self.step}: held-out loss {found.loss:.4f}, perplexity {found.perplexity:.2f}")
        return found

    def _release_graph(self) -> None:
        """Free the step graph's memory, which evaluation and sampling need."""
        if self.p.graph is not None:
            self.p.graph.release()

    def _save_once(self) -> None:
        """Save this step's checkpoint, unless it is saved already."""
        if self.saved is None or self.saved.name != checkpoint_path(self.job.output, self.step).name:
            self._save()
            self._settle()

    def _write_quantized(self) -> None:
        """Write the compressed model that a run with fake-quantized weights ends in."""
        if self.job.quantize.bits is None or (self.step < self.p.total_steps and not self._stopped_early):
            return
        parts = quantized_parts(self.p.model)  # all ranks: ZeRO's gather
        if self.writes:
            run, spec, tokenizer = self.job.output, self.p.model.spec, self.p.tokenizer
            written = self.ranks.on_first(lambda: write_quantized(run, spec, parts, tokenizer))
            self.progress.say(f"compressed model: {written}")

    def _settle(self) -> None:
        if self.opened_run is not None:
            self.opened_run.settle()

    def _save(self) -> None:
        p, saving = self.p, self.job.saving
        position = Position(
            step=self.step,
            loader=p.loader.state_dict(),
            loss_scale=asdict(p.scale),
            job=self.job.model_dump(mode="json"),
            facts=p.facts,
        )
        dtype = COMPUTE_DTYPES[p.precision]
        kept: dict[str, Any] = {"keep": saving.keep, "keep_best": saving.keep_best}
        if self.saver is not None:
            self.saver.save(self.job.output, p.model, p.optimizer, dtype, p.tokenizer, position, **kept)
        else:
            content = gathered(p.model, p.optimizer, dtype, self.ranks)
            content = replace(content, adapter=saved_adapter(self.job, p.facts, p.precision))
            self.ranks.on_first(lambda: save_checkpoint(self.job.output, content, p.tokenizer, position, **kept))
        self.saved = checkpoint_path(self.job.output, self.step)

    def _result(self) -> RunResult:
        p, pace = self.p, self.pace
        assert self.saved is not None
        return RunResult(
            run=self.job.output,
            checkpoint=self.saved,
            step=self.step,
            steps=p.total_steps,
            params=p.model.spec.params(),
            device=device_name(p.device),
            precision=p.precision,
            start=self.start,
            end=self.end,
            tokens_per_second=pace.tokens_per_second,
            train_seconds=pace.seconds,
            warmup_steps=pace.warmup_steps,
            warmup_seconds=pace.warmup_seconds,
            mfu=self._mfu(),
            peak_bytes=peak_memory_bytes(p.device),
            rank=self.ranks.process,
            samples=self._samples(),
            stopped_by=self.stopped_by,
            stopped_early=self._stopped_early,
            expert_load=self.experts.of_run(),
        )

    def _mfu(self) -> float | None:
        p = self.p
        if p.device.type != "cuda":
            return None
        memory_bytes = torch.cuda.get_device_properties(p.device).total_memory
        peak = peak_flops(device_name(p.device), memory_bytes, p.precision)
        flops = token_flops(p.model.spec, self.job.data.sequence_length, frozen=self.job.adapter.rank is not None)
        spent = self.pace.tokens_per_second * flops
        return None if peak is None else spent / (peak * self.ranks.processes)

    def _samples(self) -> list[tuple[str, str]]:
        """The model's continuations of the job's prompts; a sharded model is loaded whole from the checkpoint."""
        p, settings = self.p, self.job.evaluation
        if self.stopped_by is not None or not self.ranks.first or not settings.prompts:
            return []
        self._release_graph()
        loaded = LoadedModel(p.model, p.tokenizer, str(self.job.output))
        if not p.optimizer.is_whole:
            loaded = load_model(str(self.saved), device=p.device, dtype=COMPUTE_DTYPES[p.precision])
        sampling = Sampling(max_tokens=settings.sample_tokens, temperature=settings.temperature, seed=self.job.seed)
        return [(prompt, "".join(next(iter(continue_text(loaded, prompt, sampling))))) for prompt in settings.prompts]


def device_name(device: torch.device) -> str:
    """The GPU's name, or how many CPU threads there are."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def _finite(value: float) -> float | None:
    """JSON has no NaN or infinity."""
    return value if math.isfinite(value) else None


def _held_out_losses(run: Path, step: int) -> dict[int, float]:
    """Held-out losses up to `step` by step, from the metrics of the run that is resumed."""
    rows = [
        row
        for row in read_metrics(run / METRICS_FILE)
        if isinstance(row.get("held_out_loss"), float) and row["step"] <= step
    ]
    return {row["step"]: row["held_out_loss"] for row in sorted(rows, key=lambda row: row["step"])}
