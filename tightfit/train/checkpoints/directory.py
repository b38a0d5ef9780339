"""Checkpoints: a Hugging Face directory that other programs can load, plus what resuming needs in `training/`.

    run/checkpoints/step-00000100/
        config.json  model.safetensors  tokenizer.json …     the model
        training/state.safetensors                           optimizer states, master weights, RNG
        training/state.json                                  step, loader position, loss scale, the job

The checkpoint of a run that trains adapters holds the adapters instead of the model, with the base model's name and
digest (models/adapted.py). A checkpoint is written whole or not at all (`durable.py`); the newest `keep` stay. No
pickle anywhere.

Of several ranks the first one writes: shards are all-gathered a tensor at a time, on the device, and kept in host
memory. So the files are those of a single process, and any number of ranks, in any layout, can resume from them. The
price is host memory of the checkpoint's size on the first rank's machine, and that the other ranks wait.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tightfit.bounded_files import LARGEST_RECORD_BYTES, read_json
from tightfit.collectives.shards import whole
from tightfit.durable import discard_directory, durable_directory
from tightfit.errors import UserError
from tightfit.jobs.adapter import AdapterTraining
from tightfit.levers.adapter import adapters
from tightfit.models.adapted import write_adapter
from tightfit.models.base_model import BaseModel
from tightfit.models.decoder import Decoder
from tightfit.models.files.checksums import verify, write_checksums
from tightfit.models.files.sharded_weights import load_sharded_weights
from tightfit.models.files.tensor_file import save_tensors
from tightfit.models.huggingface.weights import load_weights, stored_dtype
from tightfit.models.loading import has_sharded, verify_weights
from tightfit.models.resolve import checkpoints_of
from tightfit.models.saving import write_config, write_model
from tightfit.models.spec import ModelSpec
from tightfit.models.text.tokenizer import Tokenizer
from tightfit.parallel.ranks import ALONE, Ranks
from tightfit.train.checkpoints.damage import damage_told, other_checkpoint_sentence, refuse_damaged
from tightfit.train.metrics import METRICS_FILE, read_metrics
from tightfit.train.optimizer.adamw import MasterAdamW
from tightfit.train.precision import LossScale

FORMAT = 1
STATE_PREFIX = "optimizer/"


@dataclass(frozen=True)
class Position:
    """All that resuming needs between two steps, apart from tensors."""

    step: int
    loader: dict[str, Any]
    loss_scale: dict[str, Any]
    job: dict[str, Any]
    facts: dict[str, Any]
    """Must be the same when the run is resumed: precision, rows, fingerprints of data, base model and teacher."""


@dataclass(frozen=True)
class SavedAdapter:
    """What a checkpoint of adapters records beside their values."""

    settings: AdapterTraining
    base: BaseModel


@dataclass(frozen=True)
class Content:
    """The tensors of a checkpoint, unsharded; with `adapter`, only the model's adapters are written."""

    model: Decoder
    states: dict[str, Tensor]
    adapter: SavedAdapter | None = None

    def write(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Write model (or adapters) and tokenizer into an existing directory; states are written elsewhere."""
        if self.adapter is None:
            return write_model(folder, self.model, tokenizer)
        settings, model = self.adapter.settings, self.model
        assert settings.rank is not None
        write_config(folder, model.spec, tokenizer, model.embed.weight.dtype)
        tokenizer.save(folder)
        write_adapter(
            folder,
            model.spec,
            adapters(model),
            self.adapter.base,
            rank=settings.rank,
            alpha=settings.alpha,
            dropout=settings.dropout,
        )


def gathered(model: Decoder, optimizer: MasterAdamW, dtype: torch.dtype, ranks: Ranks = ALONE) -> Content:
    """The content of a checkpoint, weights in `dtype`. All ranks call this; the first one gets all tensors."""
    if optimizer.engine is not None:
        weights = optimizer.engine.weights(dtype, ranks)
        return Content(_complete(model.spec, weights), optimizer.engine.states(ranks))
    offloading = optimizer.offloading
    if optimizer.is_whole:
        found = model if offloading is None else _complete(model.spec, offloading.weights(model))
        return Content(found, optimizer.state())
    weights = _wholes(model.state_dict() if offloading is None else offloading.weights(model), ranks, dtype)
    states = _wholes(optimizer.state(), ranks)
    return Content(_complete(model.spec, ranks.gather_stages(weights)), ranks.gather_stages(states))


def _complete(spec: ModelSpec, weights: Mapping[str, Tensor]) -> Decoder:
    """A decoder with these tensors as its weights; it stays on the meta device where there are none."""
    with torch.device("meta"):
        model = Decoder(spec)
    if weights:
        model.load_state_dict(weights, assign=True)
    return model


def _wholes(tensors: Mapping[str, Tensor], ranks: Ranks, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Every tensor of this stage, all-gathered, in host memory of the stage's leader, cast to `dtype` if given; nothing
    on the other ranks."""
    found = {}
    for name, tensor in tensors.items():
        complete = whole(tensor)
        if ranks.is_stage_leader:
            found[name] = complete.to("cpu", stored_dtype(name, dtype) or complete.dtype)
    return found


def checkpoint_path(run: Path, step: int) -> Path:
    """Where the checkpoint of `step` is, or will be."""
    return run / "checkpoints" / f"step-{step:08d}"


def save_checkpoint(
    run: Path, content: Content, tokenizer: Tokenizer, position: Position, keep: int, *, keep_best: bool = False
) -> Path:
    """Write the checkpoint of `position.step`, then delete older ones than the newest `keep`, but for the best one if
    `keep_best`."""
    target = checkpoint_path(run, position.step)
    try:
        if target.exists():
            discard_directory(target)
        with durable_directory(target) as folder:
            content.write(folder, tokenizer)
            _write_training_state(folder / "training", content.states, position)
            write_checksums(folder)
        for old in superseded(run, keep, keep_best=keep_best):
            discard_directory(old)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot write checkpoint {target}: {reason}; make room or change `output`; {last_checkpoint_sentence(run)}"
        ) from error
    return target


def last_checkpoint_sentence(run: Path) -> str:
    """The end of an error message: the checkpoint that can be resumed from."""
    found = checkpoints_of(run)
    return f"the last good checkpoint is {found[-1]}" if found else "no checkpoint had been saved yet"


def _write_training_state(folder: Path, states: Mapping[str, Tensor], position: Position) -> None:
    folder.mkdir()
    tensors = {f"{STATE_PREFIX}{name}": tensor for name, tensor in states.items()}
    tensors["rng/cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["rng/cuda"] = torch.cuda.get_rng_state()
    save_tensors(tensors, folder / "state.safetensors")
    content = {"format": FORMAT, **position.__dict__}
    (folder / "state.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_position(checkpoint: Path) -> Position:
    """The position a checkpoint was taken at, if its files are whole."""
    path = checkpoint / "training" / "state.json"
    refuse_damaged(checkpoint)
    content = read_json(path, LARGEST_RECORD_BYTES, "a training state", remedy="go back to another checkpoint")
    try:
        if content.pop("format") != FORMAT:
            raise UserError(f"{path} was written by another version of tightfit; resume with that one")
        position = Position(**content)
        _check_position(position)
        if checkpoint.name != f"step-{position.step:08d}":
            raise ValueError(f"it is of step {position.step}, and its directory is {checkpoint.name}")
        return position
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is damaged ({error}); {other_checkpoint_sentence(checkpoint)}") from None


def _check_position(position: Position) -> None:
    """Raise ValueError where a field has not the type or range that resuming relies on."""
    if type(position.step) is not int or position.step < 0:
        raise ValueError(f"step is {position.step!r:.40}")
    for name in ("loader", "loss_scale", "job", "facts"):
        if not isinstance(getattr(position, name), dict):
            raise ValueError(f"{name} is not an object")
    scale = LossScale(**position.loss_scale)
    if not (type(scale.calm_steps) is type(scale.growth_interval) is int and isinstance(scale.dynamic, bool)):
        raise ValueError("loss_scale has counts that are no integers")
    if not all(isinstance(each, float) and 0 < each < math.inf for each in (scale.value, scale.smallest)):
        raise ValueError("loss_scale has a factor that is none")


def restore_weights(checkpoint: Path, model: Decoder) -> None:
    """Load the weights of a checkpoint into a model of the same shape."""
    with damage_told(checkpoint):
        verify_weights(checkpoint)
    if has_sharded(checkpoint):
        load_sharded_weights(model, checkpoint)
    else:
        load_weights(model, checkpoint)


def restore_training_state(checkpoint: Path, optimizer: MasterAdamW) -> None:
    """Load optimizer states, master weights and RNG, a tensor at a time."""
    path = checkpoint / "training" / "state.safetensors"
    with damage_told(checkpoint):
        verify(checkpoint, [path.relative_to(checkpoint).as_posix()])
    try:
        with safe_open(path, framework="pt") as file:
            saved = _States(file)
            own = {name: saved[name] for name in optimizer.state_in(saved)} if optimizer.pipeline_ranks > 1 else saved
            optimizer.load_state(own, str(path))
            names = set(file.keys())
            if "rng/cpu" in names:
                torch.set_rng_state(file.get_tensor("rng/cpu"))
            if "rng/cuda" in names and torch.cuda.is_available():
                torch.cuda.set_rng_state(file.get_tensor("rng/cuda"))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is missing or damaged ({error}); {other_checkpoint_sentence(checkpoint)}") from None


class _States(Mapping[str, Tensor]):
    """The optimizer's tensors in an open safetensors file, each read on access."""

    def __init__(self, file: Any) -> None:
        self.file = file
        stored: list[str] = file.keys()
        self.names = {name.removeprefix(STATE_PREFIX) for name in stored if name.startswith(STATE_PREFIX)}

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> Tensor:
        return self.file.get_tensor(f"{STATE_PREFIX}{name}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def best_checkpoint(run: Path) -> Path | None:
    """The checkpoint with the lowest held-out loss, of those that were evaluated."""
    losses = {row["step"]: row["held_out_loss"] for row in read_metrics(run / METRICS_FILE) if "held_out_loss" in row}
    evaluated = {path: losses[step] for path in checkpoints_of(run) if (step := step_of(path)) in losses}
    return min(evaluated, key=lambda path: evaluated[path]) if evaluated else None


def superseded(run: Path, keep: int, *, keep_best: bool) -> list[Path]:
    """The checkpoints to delete: all but the newest `keep` and, with `keep_best`, the best."""
    best = best_checkpoint(run) if keep_best else None
    return [path for path in checkpoints_of(run)[:-keep] if path != best]


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint was taken after, from its name."""
    return int(checkpoint.name.removeprefix("step-"))
