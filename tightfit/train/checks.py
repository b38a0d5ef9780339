"""All checks of a run, made before anything is allocated or written.

Order: the rules, the model's shape, the checkpoint that is resumed, tokenizer, data, room in host memory and on disk.
The only thing that is written is the token cache. `tightfit train --dry-run` ends here; a run goes on with
preparation.py, and writes for the first time in run_directory.py.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tightfit.counted import counted
from tightfit.errors import UserError
from tightfit.hardware.cpu import has_native_bf16
from tightfit.jobs.adapter import AdapterTraining
from tightfit.jobs.job import Job, PrecisionName, rounded_vocabulary
from tightfit.jobs.layout import Layout
from tightfit.jobs.quantize import Quantize
from tightfit.jobs.workload import Workload
from tightfit.models.generate import check_prompt, prompt_tokens
from tightfit.models.huggingface.config import config_from_spec
from tightfit.models.loading import digest_of, has_weights, source_spec
from tightfit.models.resolve import reshaped, resolve_spec
from tightfit.models.spec import ModelSpec
from tightfit.models.text.tokenizer import Tokenizer, load_tokenizer
from tightfit.parallel.ranks import Ranks
from tightfit.plan.host_room import refuse_host_shortage, refuse_saving_shortage
from tightfit.printable import Say
from tightfit.train.checkpoints.directory import Position, read_position
from tightfit.train.checkpoints.room import refuse_full_disk
from tightfit.train.deepspeed_engine import refuse_what_deepspeed_cannot
from tightfit.train.distillation import check_teacher, teacher_source, teacher_spec
from tightfit.train.precision import choose_precision
from tightfit.train.run_data import RunData, find_data, find_tokenizer, warn_of_lost_answers
from tightfit.train.trackers import require_trackers


@dataclass(frozen=True)
class CheckedRun:
    """A job that passed all checks, with its shape, device, precision, tokenizer and data."""

    job: Job
    checkpoint: Path | None
    position: Position | None
    device: torch.device
    precision: PrecisionName
    spec: ModelSpec
    tokenizer: Tokenizer
    data: RunData
    total_steps: int
    facts: dict[str, Any]
    """Must be the same when the run is resumed: precision, rows, fingerprints of data, base model and teacher."""

    @property
    def workload(self) -> Workload:
        """What a plan needs to know of the job."""
        return Workload.of_job(self.job, self.spec, self.precision, teacher_spec(self.job))

    @property
    def first_step(self) -> int:
        """Steps already taken, those of the checkpoint."""
        return 0 if self.position is None else self.position.step

    @property
    def is_finished(self) -> bool:
        """Whether the checkpoint is that of the last step."""
        return self.first_step == self.total_steps


def check_run(
    job: Job,
    checkpoint: Path | None,
    say: Say,
    *,
    show_bars: bool,
    device: torch.device,
    ranks: Ranks,
    saves: bool = True,
    replaces: bool = False,
) -> CheckedRun:
    """Check all that `job` needs to begin, or to resume from `checkpoint`; every rank calls this.

    `saves`: checkpoints will be written. `replaces`: the first of them replaces an older run in the output.
    """
    if sentence := job.refusal():
        raise UserError(sentence)
    if replaces:
        _refuse_own_sources(job)
    position = None if checkpoint is None else read_position(checkpoint)
    precision = ranks.broadcast(_precision(job, position, device))
    if checkpoint is not None and position is not None:
        _refuse_contradictions(job, precision, position, checkpoint)
    _refuse_missing_packages(job, checkpoint, device, saves=saves)
    spec, tokenizer, data = _found(job, checkpoint, say, show_bars, ranks)
    if saves:
        config_from_spec(spec, dtype="float32")  # refuses a shape that a checkpoint's config.json could not say
    check_teacher(job, spec, tokenizer)
    facts = {"precision": precision, "data": data.store.fingerprint, "rows": len(data.train)}
    if job.adapter.rank is not None and saves:
        facts["base"] = _base_digest(job)
    if (teacher := teacher_source(job)) is not None and saves:
        facts["teacher"] = digest_of(teacher)
    _refuse_other_facts(job, facts, position, checkpoint, ranks)
    _tell_model(job, spec, precision, device, ranks, say)
    total = total_steps(job, len(data.train))
    _refuse_passed(position, checkpoint, total)
    checked = CheckedRun(
        job=job,
        checkpoint=checkpoint,
        position=position,
        device=device,
        precision=precision,
        spec=spec,
        tokenizer=tokenizer,
        data=data,
        total_steps=total,
        facts=facts,
    )
    _refuse_shortages(checked, saves=saves, replaces=replaces)
    return checked


def _refuse_own_sources(job: Job) -> None:
    """Refuse to replace the run that the new one is made of, and needs again when it is resumed or used."""
    sources = {
        "model": job.model.source,
        "distill.teacher": teacher_source(job),
        "tokenizer.source": job.tokenizer.source,
    }
    for field, source in sources.items():
        if source is not None and any(place == job.output for place in (Path(source), *Path(source).parents)):
            raise UserError(
                f"{field} is {source}, a run that this one would replace in {job.output}; choose another output"
            )


def _refuse_missing_packages(job: Job, checkpoint: Path | None, device: torch.device, *, saves: bool) -> None:
    if job.engine == "deepspeed":
        refuse_what_deepspeed_cannot(job, checkpoint, device)
    if saves:
        require_trackers(job)


def _found(
    job: Job, checkpoint: Path | None, say: Say, show_bars: bool, ranks: Ranks
) -> tuple[ModelSpec, Tokenizer, RunData]:
    """The model's shape, the tokenizer and the data, checked against each other, the layout and the checkpoint."""
    spec = _spec(job, checkpoint)
    with ranks.main_process_first():  # the others then find tokenizer and tokens in the cache
        tokenizer = load_tokenizer(checkpoint) if checkpoint is not None else find_tokenizer(job, say, show_bars)
        spec = _with_vocabulary(job, spec, tokenizer)
        data = find_data(job, spec, tokenizer, show_bars)
    store = data.store
    say(
        f"data: {store.tokens_total:,} tokens in {counted(store.documents, 'document')}, vocabulary {spec.vocab_size:,}"
    )
    warn_of_lost_answers(data.train, say)
    for prompt in job.evaluation.prompts:  # continued at the end of the run, which would be lost to a refusal
        check_prompt(prompt_tokens(tokenizer, prompt, chat=False), spec)
    _refuse_split(spec, job)
    if checkpoint is not None:
        refuse_other_shape(checkpoint, spec)
    return spec, tokenizer, data


def _refuse_shortages(checked: CheckedRun, *, saves: bool, replaces: bool) -> None:
    """Refuse a run for which host memory, or the disk for its checkpoints, is too small."""
    job = checked.job
    ranks_here = _ranks_here(job.layout, checked.device)
    refuse_host_shortage(checked.workload, job.layout, job.levers, ranks_here)
    if saves and checked.device.type == "cuda" and torch.cuda.is_available():  # a dry run may be on any machine
        refuse_saving_shortage(
            checked.workload, job.layout, job.levers, sharded=job.saves_sharded, ranks_here=ranks_here
        )
    if saves:
        refuse_full_disk(
            job,
            checked.workload,
            first_step=checked.first_step,
            total_steps=checked.total_steps,
            replaces=replaces,
        )


def _precision(job: Job, position: Position | None, device: torch.device) -> PrecisionName:
    """The job's precision; `auto` keeps that of the checkpoint that is resumed."""
    if job.precision == "auto" and position is not None and "precision" in position.facts:
        found: PrecisionName = position.facts["precision"]
        return found
    return choose_precision(job.precision, device)


def _refuse_split(spec: ModelSpec, job: Job) -> None:
    """Refuse a layout that cannot divide this model."""
    if sentence := job.refusal(spec):
        raise UserError(sentence)


def _tell_model(job: Job, spec: ModelSpec, precision: str, device: torch.device, ranks: Ranks, say: Say) -> None:
    place = device.type if ranks.processes == 1 else f"{ranks.processes} × {device.type}"
    adapted = job.adapter.adapted(spec=spec)
    trained = "" if adapted is None else f" frozen, {adapted.params(spec):,} of adapters"
    say(f"model: {spec.params():,} parameters{trained}, {precision} on {place}")
    if device.type == "cpu" and "bf16" in precision and not has_native_bf16():
        say("this CPU has no bf16 instructions: expect some 200 times fp32's time, or set precision=fp32")


def _ranks_here(layout: Layout, device: torch.device) -> int:
    """Ranks of all axes that share this node's host memory."""
    return min(layout.ranks, max(1, torch.cuda.device_count())) if device.type == "cuda" else layout.ranks


def total_steps(job: Job, rows: int) -> int:
    """The optimizer steps of a run over `rows` rows."""
    total = job.steps or math.ceil((job.epochs or 0) * rows / job.global_batch)
    if job.schedule.warmup_steps > total:
        raise UserError(
            f"schedule.warmup_steps is {job.schedule.warmup_steps}, more than the {total} steps that {job.epochs:g} "
            f"epochs of {rows} rows make; lower it or train longer"
        )
    return total


def _refuse_passed(position: Position | None, checkpoint: Path | None, total: int) -> None:
    if position is not None and position.step > total:
        raise UserError(
            f"{checkpoint} has {position.step} steps, more than the {total} of this job; raise steps or resume from an "
            "earlier checkpoint with --from"
        )


def _refuse_other_facts(
    job: Job, facts: dict[str, Any], position: Position | None, checkpoint: Path | None, ranks: Ranks
) -> None:
    """Refuse ranks with different jobs or data, and a resumed run whose facts differ from its checkpoint's."""
    own = job.model_dump(mode="json"), facts
    if ranks.max(int(ranks.broadcast(own) != own)):
        raise UserError(
            "the processes of this run do not agree on the job or its data; start all of them with the same job file, "
            "overrides and data"
        )
    if position is None:
        return
    for name in {**facts, **position.facts}:
        if (saved := position.facts.get(name)) != (found := facts.get(name)) and not _is_unknown(name, position):
            raise UserError(
                f"{checkpoint} was made with {name} {saved}, this run has {found}; resume with the "
                f"{OWNERS.get(name, 'data')} it was started with"
            )


OWNERS = {"base": "model", "teacher": "teacher"}
"""Fact → what the user must resume with where it has changed; of other facts the data."""


def _is_unknown(name: str, position: Position) -> bool:
    """Whether the checkpoint's job has a teacher but no digest of it, as checkpoints of older versions do."""
    return name == "teacher" and name not in position.facts and bool(_look_up(position.job, "distill.teacher"))


def _spec(job: Job, checkpoint: Path | None) -> ModelSpec:
    """The model's shape with the job's changes, if it can take the job's rows."""
    source = job.model.source
    if checkpoint is not None and Path(source).is_absolute() and not Path(source).exists():
        # The directory that the run began from is gone, and not needed: the checkpoint has the shape.
        return job.experts.applied(resolve_spec(str(checkpoint)))
    spec = source_spec(source)
    if wants_weights(job) and job.model.shape:
        raise UserError(f"model.shape changes {source}, whose weights then do not fit; set model.weights=random")
    spec = job.experts.applied(reshaped(spec, job.model.shape, source))
    if job.data.sequence_length > spec.max_positions:
        raise UserError(
            f"data.sequence_length is {job.data.sequence_length}, but {source} has {spec.max_positions} "
            "positions; shorten the rows or choose a model with more"
        )
    return spec


def wants_weights(job: Job) -> bool:
    """Whether the model begins with the weights of its source."""
    found = has_weights(job.model.source)
    if job.model.weights == "pretrained" and not found:
        raise UserError(f"model.weights is pretrained, but {job.model.source} has none; give a directory or GGUF file")
    return found and job.model.weights != "random"


def _base_digest(job: Job) -> str:
    """Digest of the base model's weights, without which saved adapters cannot be loaded."""
    if not wants_weights(job):
        raise UserError(
            f"adapter.rank trains on top of a model's weights, but the run would begin {job.model.source} at random; "
            "name a directory or a GGUF file that has weights, and set model.weights=auto"
        )
    return digest_of(job.model.source)


def _with_vocabulary(job: Job, spec: ModelSpec, tokenizer: Tokenizer) -> ModelSpec:
    """A model that starts at random takes the vocabulary of the tokenizer trained for it."""
    if job.tokenizer.source != "train":
        return spec
    if wants_weights(job):
        raise UserError(f"tokenizer.source is train, but {job.model.source} has weights; set model.weights=random")
    return replace(spec, vocab_size=rounded_vocabulary(tokenizer.vocab_size))


def refuse_other_shape(checkpoint: Path, spec: ModelSpec) -> None:
    """Refuse a checkpoint whose model has another shape than the job's."""
    saved, spec = resolve_spec(str(checkpoint)), spec.as_saved
    if saved != spec:
        name = next(n for n in spec.__dataclass_fields__ if getattr(saved, n) != getattr(spec, n))
        ours, theirs = getattr(spec, name), getattr(saved, name)
        raise UserError(f"the job's model has {name} {ours}, checkpoint {checkpoint} has {theirs}; make them equal")


FIXED_FIELDS = (
    *("tokenizer.vocab_size", "tokenizer.train_bytes", "objective", "global_batch", "seed", "data.field"),
    *("data.sequence_length", "data.separate_documents", "data.pack"),
)
"""Fields that a resumed run may not change, beside the sections `adapter` and `quantize`; schedule, learning rate,
steps, micro-batch and reporting may change.

Paths may change too: the model's shape, the data's tokens and the precision are compared directly.
"""


def _refuse_contradictions(job: Job, precision: str, position: Position, checkpoint: Path) -> None:
    now = job.model_dump(mode="json")
    pairs = [(name, _look_up(position.job, name), _look_up(now, name)) for name in FIXED_FIELDS]
    pairs.append(("precision", position.facts.get("precision"), precision))
    shares = [_look_up(fields, "data.held_out") for fields in (position.job, now)]
    if any(isinstance(share, float) for share in shares):
        pairs.append(("data.held_out", *shares))
    sources = [_look_up(fields, "tokenizer.source") for fields in (position.job, now)]
    if any(source in ("model", "train") for source in sources):
        pairs.append(("tokenizer.source", *sources))
    for section, kind in (("adapter", AdapterTraining), ("quantize", Quantize)):
        both = [kind.model_validate(fields.get(section) or {}) for fields in (position.job, now)]
        pairs += [(f"{section}.{name}", *(getattr(each, name) for each in both)) for name in kind.model_fields]
    for name, saved, wanted in pairs:
        if saved != wanted:
            raise UserError(
                f"{name} is {wanted!r}, but {checkpoint} was made with {saved!r}; set it back, or start a new output"
            )


def _look_up(fields: dict[str, Any], path: str) -> Any:
    for part in path.split("."):
        fields = fields.get(part, {}) if isinstance(fields, dict) else {}
    return fields
