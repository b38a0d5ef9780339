"""From a job to everything a run needs; what can fail quickly is tried before anything slow starts.

Order: output directory, model shape against sequence length, tokenizer, tokenized data, weights, optimizer. A resumed
run takes weights, tokenizer and position from its checkpoint and must otherwise find what that was made with.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, Subset

from tightfit.durable import discard_directory, durable_directory, durable_file
from tightfit.errors import UserError
from tightfit.hardware.cpu import has_native_bf16
from tightfit.jobs.job import Job, PrecisionName
from tightfit.jobs.workload import Workload
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.loading import has_sharded, has_weights, load_into, load_source_tokenizer, source_spec
from tightfit.models.resolve import reshaped
from tightfit.models.spec import ModelSpec
from tightfit.models.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from tightfit.parallel.ranks import Ranks
from tightfit.plan.host_room import refuse_host_shortage
from tightfit.train.assembly import assemble, unfilled
from tightfit.train.checkpoints.directory import Position, read_position, restore_training_state, restore_weights
from tightfit.train.checkpoints.sharded import restore_sharded_states
from tightfit.train.data.chats import read_chats
from tightfit.train.data.dataset import PackedChats, PackedText
from tightfit.train.data.held_out import Part, split
from tightfit.train.data.loader import Loader, make_loader
from tightfit.train.data.shards import prepare_chats, prepare_text
from tightfit.train.data.sources import Source, find_sources
from tightfit.train.data.texts import read_texts
from tightfit.train.data.token_store import TokenStore
from tightfit.train.deepspeed_engine import deepspeed_assembled, refuse_what_deepspeed_cannot
from tightfit.train.optimizer.adamw import MasterAdamW
from tightfit.train.precision import LossScale, choose_precision

Rows = Dataset[dict[str, Tensor]]
Say = Callable[[str], None]
VOCAB_MULTIPLE = 64
"""Vocabularies of new models are rounded up to this, which keeps the output GEMM aligned on every GPU."""


@dataclass
class Prepared:
    """A run ready to step."""

    job: Job
    device: torch.device
    precision: PrecisionName
    ranks: Ranks
    model: Decoder
    """The decoder: this rank's copy of it, or its shards."""
    module: nn.Module
    """What a training step calls: the decoder, or DDP around it."""
    tokenizer: Tokenizer
    optimizer: MasterAdamW
    scale: LossScale
    loader: Loader
    held_out: Rows | None
    total_steps: int
    facts: dict[str, Any]
    checkpoint: Path | None
    position_step: int

    @property
    def evaluated(self) -> nn.Module:
        """What computes a loss without gradients: what training calls, but without DDP around it."""
        return self.model if isinstance(self.module, DistributedDataParallel) else self.module


def claim_output(job: Job, *, resuming: bool, overwrite: bool) -> None:
    """Make the run's directory and put the job in it; a directory that already holds a run needs a decision."""
    checkpoints = job.output / "checkpoints"
    try:
        job.output.mkdir(parents=True, exist_ok=True)
        if checkpoints.is_dir() and any(checkpoints.glob("step-*")) and not resuming:
            if not overwrite:
                raise UserError(f"{job.output} already holds a run; add --resume, --overwrite or -o output=ELSEWHERE")
            discard_directory(checkpoints)
        with durable_file(job.output / "job.yaml") as file:
            file.write_text(yaml.safe_dump(job.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write output {job.output}: {error.strerror}; choose a writable directory") from error


def prepare(
    job: Job,
    checkpoint: Path | None,
    say: Say,
    *,
    show_bars: bool,
    device: torch.device,
    mesh: DeviceMesh | None,
) -> Prepared:
    """Everything this rank needs for `job`, restored to where `checkpoint` was taken if there is one."""
    position = None if checkpoint is None else read_position(checkpoint)
    ranks, precision = Ranks.of(mesh), choose_precision(job.precision, device)
    if position is not None:
        _refuse_contradictions(job, precision, position, checkpoint)
    if job.engine == "deepspeed":
        refuse_what_deepspeed_cannot(job, checkpoint, device)
    spec = _spec(job)
    with ranks.main_process_first():  # the others then find tokenizer and tokens in the cache
        tokenizer = load_tokenizer(checkpoint) if checkpoint is not None else _tokenizer(job, say, show_bars)
        spec = _with_vocabulary(job, spec, tokenizer)
        store, train_rows, kept_aside = _datasets(job, spec, tokenizer, show_bars)
    say(f"data: {store.tokens_total:,} tokens in {store.documents:,} documents, vocabulary {spec.vocab_size:,}")
    facts = {"precision": precision, "data": store.fingerprint, "rows": len(train_rows)}
    _refuse_other_facts(job, facts, position, checkpoint, ranks)
    say(f"model: {spec.params():,} parameters, {precision} on {_place(device, ranks)}")
    if device.type == "cpu" and "bf16" in precision and not has_native_bf16():
        say("this CPU has no bf16 instructions: expect some 200 times fp32's time, or set precision=fp32")
    here = min(ranks.world, max(1, torch.cuda.device_count())) if device.type == "cuda" else ranks.world
    refuse_host_shortage(Workload.of_job(job, spec, precision), job.layout, job.levers, here)
    model, module, optimizer = _assembled(job, spec, device, precision, checkpoint, mesh)
    loader, scale = _position(job, train_rows, precision, position, ranks)
    if checkpoint is not None:
        restore = restore_sharded_states if has_sharded(checkpoint) else restore_training_state
        restore(checkpoint, optimizer)
        say(f"resumed from {checkpoint}")
    return Prepared(
        job=job, device=device, precision=precision, ranks=ranks, model=model, module=module, tokenizer=tokenizer,
        optimizer=optimizer, scale=scale, loader=loader,
        held_out=None if kept_aside is None else evenly(kept_aside, job.evaluation.max_rows),
        total_steps=job.steps or math.ceil((job.epochs or 0) * len(train_rows) / job.global_batch),
        facts=facts, checkpoint=checkpoint, position_step=position.step if position is not None else 0,
    )  # fmt: skip


def _refuse_other_facts(
    job: Job, facts: dict[str, Any], position: Position | None, checkpoint: Path | None, ranks: Ranks
) -> None:
    """All ranks must have the same job and data, and a resumed run those of its checkpoint."""
    own = job.model_dump(mode="json"), facts
    if ranks.max(int(ranks.broadcast(own) != own)):
        raise UserError(
            "the processes of this run do not agree on the job or its data; start all of them with the same job file, "
            "overrides and data"
        )
    if position is not None and position.facts != facts:
        name = next(key for key in facts if position.facts.get(key) != facts[key])
        raise UserError(
            f"{checkpoint} was made with {name} {position.facts.get(name)}, this run has {facts[name]}; "
            "resume with the data it was started with"
        )


def _place(device: torch.device, ranks: Ranks) -> str:
    return device.type if ranks.processes == 1 else f"{ranks.processes} × {device.type}"


def _spec(job: Job) -> ModelSpec:
    """The model's shape with the job's changes, if it can take the job's rows."""
    spec = source_spec(job.model.source)
    if _wants_weights(job) and job.model.shape:
        raise UserError(
            f"model.shape changes {job.model.source}, whose weights then do not fit; set model.weights=random"
        )
    spec = reshaped(spec, job.model.shape, job.model.source)
    if job.data.sequence_length > spec.max_positions:
        raise UserError(
            f"data.sequence_length is {job.data.sequence_length}, but {job.model.source} has {spec.max_positions} "
            "positions; shorten the rows or choose a model with more"
        )
    return spec


def _wants_weights(job: Job) -> bool:
    found = has_weights(job.model.source)
    if job.model.weights == "pretrained" and not found:
        raise UserError(f"model.weights is pretrained, but {job.model.source} has none; give a directory or GGUF file")
    return found and job.model.weights != "random"


def _tokenizer(job: Job, say: Say, show_bars: bool) -> Tokenizer:
    match job.tokenizer.source:
        case "model":
            return load_source_tokenizer(job.model.source)
        case "train":
            return _trained_tokenizer(job, say, show_bars)
        case directory:
            return load_tokenizer(directory)


def _trained_tokenizer(job: Job, say: Say, show_bars: bool) -> Tokenizer:
    """Trained once per data, vocabulary and size, then kept beside the tokenized shards."""
    sources = find_sources(job.data.train, rows_only=job.objective == "sft")
    stamps = [list(stamp) for source in sources for stamp in source.stamps()]
    recipe = json.dumps([job.tokenizer.model_dump(), job.objective, job.data.field, stamps])
    kept = job.data.cache.expanduser() / "tokenizers" / hashlib.sha256(recipe.encode()).hexdigest()[:32]
    if (kept / "tokenizer.json").is_file():
        return load_tokenizer(kept)
    say(f"training a tokenizer of {job.tokenizer.vocab_size:,} tokens on the data")

    texts = _first_texts(job, sources)
    trained = train_tokenizer(texts, job.tokenizer.vocab_size, progress=show_bars)
    try:
        with durable_directory(kept) as folder:
            trained.save(folder)
    except OSError as error:
        if not kept.is_dir():  # else another process was first
            raise UserError(
                f"cannot write data.cache {job.data.cache}: {error.strerror}; choose another place"
            ) from error
    return load_tokenizer(kept)


def _first_texts(job: Job, sources: list[Source]) -> Iterator[str]:
    """As much of the data as a trained tokenizer looks at: documents, or what is said in conversations."""
    said = (message["content"] for chat in read_chats(sources) for message in chat.messages)
    texts = said if job.objective == "sft" else (piece.text for piece in read_texts(sources, job.data.field))
    seen = 0
    for text in texts:
        yield text
        seen += len(text)
        if seen >= job.tokenizer.train_bytes:
            return


def _with_vocabulary(job: Job, spec: ModelSpec, tokenizer: Tokenizer) -> ModelSpec:
    """A model that starts at random takes the vocabulary of the tokenizer trained for it."""
    if job.tokenizer.source != "train":
        return spec
    if _wants_weights(job):
        raise UserError(f"tokenizer.source is train, but {job.model.source} has weights; set model.weights=random")
    return replace(spec, vocab_size=-(-tokenizer.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE)


def _datasets(
    job: Job, spec: ModelSpec, tokenizer: Tokenizer, show_bars: bool
) -> tuple[TokenStore, PackedText | PackedChats, PackedText | PackedChats | None]:
    """The tokenized data, the rows to train on, and the rows kept aside."""
    data = job.data

    def store_of(names: list[str]) -> TokenStore:
        common = {"cache_dir": data.cache, "vocab_size": spec.vocab_size, "progress": show_bars}
        if job.objective == "sft":
            return prepare_chats(names, tokenizer, **common)  # type: ignore[arg-type]
        return prepare_text(names, tokenizer, field=data.field, **common)  # type: ignore[arg-type]

    def rows(store: TokenStore, part: Part | None = None) -> PackedText | PackedChats:
        if job.objective == "sft":
            return PackedChats(store, data.sequence_length, seed=job.seed, part=part, pack=data.pack)
        return PackedText(store, data.sequence_length, part=part, separate_documents=data.separate_documents)

    store = store_of(data.train)
    if isinstance(data.held_out, list):
        return store, rows(store), rows(store_of(data.held_out)) if data.held_out else None
    kept, aside = split(store, data.held_out, seed=job.seed, sequence_length=data.sequence_length)
    return store, rows(store, kept), None if aside is None else rows(store, aside)


def evenly(rows: PackedText | PackedChats, count: int) -> Rows:
    """About `count` rows spread over all of `rows`, so that a few evaluated rows see the whole variety."""
    return Subset(rows, range(0, len(rows), math.ceil(len(rows) / count)))


def _assembled(
    job: Job, spec: ModelSpec, device: torch.device, precision: PrecisionName, checkpoint: Path | None,
    mesh: DeviceMesh | None,
) -> tuple[Decoder, nn.Module, MasterAdamW]:  # fmt: skip
    """Weights from the checkpoint, the source or the seed, split and optimized as the job says."""

    def fill(model: Decoder) -> None:
        torch.manual_seed(job.seed)
        if checkpoint is not None:
            restore_weights(checkpoint, model)
        elif _wants_weights(job):
            load_into(model, job.model.source)
        else:
            init_weights(model, device=device)

    if job.engine == "deepspeed":
        return deepspeed_assembled(job, spec, device, precision, fill)
    model = unfilled(spec, job.layout, precision, device, job.levers)
    module, optimizer = assemble(
        model, mesh, job.layout, job.levers, precision, job.optimizer, device, fill, job.seed, job.data.sequence_length
    )
    return model, module, optimizer


def _position(
    job: Job, rows: Rows, precision: PrecisionName, position: Position | None, ranks: Ranks
) -> tuple[Loader, LossScale]:
    micro_batch = job.layout.micro_batch
    loader = make_loader(rows, micro_batch=micro_batch, seed=job.seed, rank=ranks.rank, world=ranks.world)
    if position is None:
        return loader, LossScale.for_precision(precision)
    loader.load_state_dict(position.loader)
    return loader, LossScale(**position.loss_scale)


FIXED_FIELDS = ("model", "tokenizer", "objective", "global_batch", "seed", "data.train", "data.held_out", "data.field",
                "data.sequence_length", "data.separate_documents", "data.pack")  # fmt: skip
"""What a resumed run may not change; schedule, learning rate, steps, batching of memory and reporting it may."""


def _refuse_contradictions(job: Job, precision: str, position: Position, checkpoint: Path | None) -> None:
    now = job.model_dump(mode="json")
    pairs = [(name, _look_up(position.job, name), _look_up(now, name)) for name in FIXED_FIELDS]
    pairs.append(("precision", position.facts.get("precision"), precision))
    for name, saved, wanted in pairs:
        if saved != wanted:
            raise UserError(
                f"{name} is {wanted!r}, but {checkpoint} was made with {saved!r}; set it back, or start a new output"
            )


def _look_up(fields: dict[str, Any], path: str) -> Any:
    for part in path.split("."):
        fields = fields.get(part, {})
    return fields
