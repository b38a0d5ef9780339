"""Checkpoints in pieces, written by all ranks while training goes on (`saving.sharded`, the default of several ranks).

    run/checkpoints/step-00000100/
        config.json  tokenizer.json …     the model, without weights
        sharded/                          weights and optimizer states in pieces (torch.distributed.checkpoint)
        training/state.json               step, loader position, loss scale, the job

Saving copies a rank's shards to host memory (of tensors that several data ranks hold, only the first one does) and
returns; a thread of each rank writes its pieces, with a process group of its own, and the first process renames the
directory when all pieces are on the disk. A kill before that leaves the previous checkpoint. One checkpoint is written
at a time: the next save waits for it. A run of any layout can resume from the pieces, and models are exported from them
(models/files/sharded_weights.py). The directory must be on a file system that all ranks share.
"""

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import async_save

from tightfit.durable import TEMPORARY_PREFIX, discard_directory, flush, flush_tree
from tightfit.errors import UserError
from tightfit.jobs.layout import Layout
from tightfit.jobs.saving import shard_holders
from tightfit.models.decoder import Decoder
from tightfit.models.files.checksums import write_checksums
from tightfit.models.files.piece_reader import PieceReader
from tightfit.models.files.sharded_weights import FOLDER, open_pieces, read_pieces, stored_tensors, weights_of
from tightfit.models.saving import write_config
from tightfit.models.text.tokenizer import Tokenizer
from tightfit.parallel.ranks import Ranks
from tightfit.train.checkpoints.directory import (
    FORMAT,
    STATE_PREFIX,
    Position,
    checkpoint_path,
    last_checkpoint_sentence,
    superseded,
)
from tightfit.train.optimizer.adamw import STATES_REMEDY, MasterAdamW, is_optional


@dataclass
class _Pending:
    """A checkpoint being written to `folder`, to be renamed to `target`."""

    future: "Future[Any]"
    folder: Path
    target: Path
    keep: int
    keep_best: bool
    named: bool = False


class ShardedSaver:
    """Writes one checkpoint at a time in the background; all ranks call all of its methods alike."""

    def __init__(self, ranks: Ranks, layout: Layout) -> None:
        self.ranks, self.is_writer = ranks, ranks.rank < shard_holders(layout)
        """Whether this rank has shards that no earlier data rank has; other ranks do not copy theirs to the host."""
        self.group = dist.new_group(backend="gloo")  # for the thread, whose collectives must not mix with training's
        self.pending: _Pending | None = None

    def save(
        self,
        run: Path,
        model: Decoder,
        optimizer: MasterAdamW,
        dtype: torch.dtype,
        tokenizer: Tokenizer,
        position: Position,
        keep: int,
        *,
        keep_best: bool = False,
    ) -> None:
        """Start writing the checkpoint of `position.step`, once the previous one is complete."""
        self.finish()
        target = checkpoint_path(run, position.step)
        folder = self.ranks.broadcast(target.parent / f"{TEMPORARY_PREFIX}{target.name}-{uuid.uuid4().hex[:8]}")
        self.ranks.on_first(lambda: _begin(folder, target, model, dtype, tokenizer, position))
        with _failures_told(target):
            future: Any = async_save(
                _content(model, optimizer) if self.is_writer else {},
                storage_writer=PieceWriter(folder / FOLDER),
                process_group=self.group,
            )
            written = _digested(future, folder) if self.ranks.first else future
        self.pending = _Pending(written, folder, target, keep, keep_best)

    def finish(self) -> None:
        """Wait until the pending checkpoint is complete and renamed."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        self.ranks.on_first(lambda: self._name(pending))
        with _failures_told(pending.target):
            pending.future.result()

    def poll(self) -> None:
        """Rename the pending checkpoint if all of it is written; never waits."""
        if self.pending is not None and self.pending.future.done():
            self._name(self.pending)

    def _name(self, pending: _Pending) -> None:
        """Rename the checkpoint, on the first process; its write ends only after those of all ranks."""
        if self.ranks.first and not pending.named:
            with _failures_told(pending.target, pending.folder):
                pending.future.result()
                _complete(pending)
            pending.named = True


class PieceWriter(_FileSystemWriter):
    """Torch's writer, which says why a file could not be written, also where torch.save says where it stopped."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write this rank's pieces."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:  # of torch.save's archive, which wants to end where nothing can be written
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


@contextmanager
def _failures_told(target: Path, folder: Path | None = None) -> Iterator[None]:
    """Turn write errors, immediate ones and those of the background thread, into a UserError of one sentence; `folder`,
    where they were to be written, is removed."""
    try:
        yield
    except (OSError, CheckpointException) as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        failures = list(getattr(error, "failures", {}).values())  # of the ranks' threads
        cause = failures[0][0] if failures else error
        raise UserError(
            f"cannot write checkpoint {target}: {getattr(cause, 'strerror', None) or cause}; make room or change "
            f"`output`; {last_checkpoint_sentence(target.parent.parent)}"
        ) from error


def _content(model: Decoder, optimizer: MasterAdamW) -> dict[str, Tensor]:
    states = {f"{STATE_PREFIX}{name}": tensor for name, tensor in optimizer.state().items()}
    weights = weights_of(model, None if optimizer.offloading is None else optimizer.offloading.weights(model))
    return {**weights, **states, "rng/cpu": torch.get_rng_state()}


def _begin(
    folder: Path, target: Path, model: Decoder, dtype: torch.dtype, tokenizer: Tokenizer, position: Position
) -> None:
    """Write the files that are not in pieces into `folder`, which will be `target`."""
    with _failures_told(target, folder):
        (folder / "training").mkdir(parents=True)
        write_config(folder, model.spec, tokenizer, dtype)
        tokenizer.save(folder)
        state = json.dumps({"format": FORMAT, **position.__dict__}, indent=1) + "\n"
        (folder / "training" / "state.json").write_text(state, encoding="utf-8")


def _digested(written: "Future[Any]", folder: Path) -> "Future[Any]":
    """A future that is done when the writing thread has `written` the pieces and then their checksums."""
    future: Future[Any] = Future()

    def digest(done: "Future[Any]") -> None:
        try:
            done.result()
            write_checksums(folder)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    written.add_done_callback(digest)
    return future


def _complete(pending: _Pending) -> None:
    """Flush everything to the disk, rename the directory, then delete superseded checkpoints."""
    flush_tree(pending.folder)
    if pending.target.exists():
        discard_directory(pending.target)
    os.rename(pending.folder, pending.target)
    flush(pending.target.parent)
    for old in superseded(pending.target.parent.parent, pending.keep, keep_best=pending.keep_best):
        discard_directory(old)


def restore_sharded_states(checkpoint: Path, optimizer: MasterAdamW) -> None:
    """Load optimizer states, master weights and RNG; every rank reads only its own shards."""
    reader = open_pieces(checkpoint)
    stored = _stored_states(checkpoint, reader)
    own = optimizer.state_in(stored)
    random = torch.get_rng_state()
    _require_fit(checkpoint, stored, own, others_hold_more=optimizer.pipeline_ranks > 1)
    wanted = {f"{STATE_PREFIX}{name}": tensor for name, tensor in own.items()} | {"rng/cpu": random}
    read_pieces(wanted, checkpoint, reader)
    for bucket in optimizer.buckets:
        for index, name in enumerate(bucket.names):
            bucket.updater.set_step(index, own[f"step/{name}"])
    torch.set_rng_state(random)


def _stored_states(checkpoint: Path, reader: PieceReader) -> dict[str, tuple[torch.dtype, torch.Size]]:
    named = stored_tensors(checkpoint, reader).items()
    return {name.removeprefix(STATE_PREFIX): what for name, what in named if name.startswith(STATE_PREFIX)}


def _require_fit(
    checkpoint: Path,
    stored: dict[str, tuple[torch.dtype, torch.Size]],
    own: dict[str, Tensor],
    *,
    others_hold_more: bool,
) -> None:
    """Refuse states of other names, dtypes or shapes: torch would cast them, and skip stored ones without a target."""
    odd = own.keys() - stored.keys() if others_hold_more else own.keys() ^ stored.keys()
    if odd := {name for name in odd if not is_optional(name)}:
        raise UserError(
            f"{checkpoint} does not fit this run: optimizer state {min(odd)} is on one side only; {STATES_REMEDY}"
        )
    for name, tensor in own.items():
        if stored[name] != (tensor.dtype, tensor.shape):
            dtype, shape = stored[name]
            raise UserError(
                f"{checkpoint}: {name} is {dtype} {list(shape)}, this run needs {tensor.dtype} {list(tensor.shape)}; "
                f"{STATES_REMEDY}"
            )
