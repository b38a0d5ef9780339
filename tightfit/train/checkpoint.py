"""Checkpoints: a Hugging Face directory that anybody can load, plus what resuming needs in `training/`.

    run/checkpoints/step-00000100/
        config.json  model.safetensors  tokenizer.json …     the model
        training/state.safetensors                           optimizer states, master weights, RNG
        training/state.json                                  step, loader position, loss scale, the job

Each is written whole or not at all (`durable.py`); the newest `keep` stay. No pickle anywhere.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tightfit.durable import discard_directory, durable_directory, sweep
from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.huggingface.weights import load_weights
from tightfit.models.loading import checkpoints_of
from tightfit.models.resolve import resolve_spec
from tightfit.models.saving import write_model
from tightfit.models.tokenizer import Tokenizer
from tightfit.train.optimizer import MasterAdamW

FORMAT = 1


@dataclass(frozen=True)
class Position:
    """Where training stands between two steps, apart from tensors."""

    step: int
    loader: dict[str, Any]
    loss_scale: dict[str, Any]
    job: dict[str, Any]
    facts: dict[str, Any]
    """What the run found out and a resume must find again: precision, data fingerprint, total steps."""


def save_checkpoint(
    run: Path, model: Decoder, tokenizer: Tokenizer, optimizer: MasterAdamW, position: Position, keep: int
) -> Path:
    """Write the checkpoint of `position.step`, then let go of all but the newest `keep`."""
    target = run / "checkpoints" / f"step-{position.step:08d}"
    try:
        if target.exists():
            discard_directory(target)
        with durable_directory(target) as folder:
            write_model(folder, model, tokenizer)
            _write_training_state(folder / "training", optimizer, position)
        for old in checkpoints_of(run)[:-keep]:
            discard_directory(old)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot write checkpoint {target}: {reason}; make room or change `output`; {what_is_safe(run)}"
        ) from error
    return target


def what_is_safe(run: Path) -> str:
    """The end of a sentence that tells of a failure: what can be resumed from."""
    found = checkpoints_of(run)
    return f"the last good checkpoint is {found[-1]}" if found else "no checkpoint had been saved yet"


def _write_training_state(folder: Path, optimizer: MasterAdamW, position: Position) -> None:
    folder.mkdir()
    tensors = {f"optimizer/{name}": tensor for name, tensor in optimizer.state().items()}
    tensors["rng/cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["rng/cuda"] = torch.cuda.get_rng_state()
    save_file(tensors, folder / "state.safetensors")
    content = {"format": FORMAT, **position.__dict__}
    (folder / "state.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_position(checkpoint: Path) -> Position:
    """The position a checkpoint was taken at."""
    path = checkpoint / "training" / "state.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != FORMAT:
            raise UserError(f"{path} was written by another version of tightfit; resume with that one")
        return Position(**content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is missing or damaged ({error}); resume from an older checkpoint") from None


def restore_weights(checkpoint: Path, model: Decoder) -> None:
    """Load the weights of a checkpoint into a model of the same shape."""
    saved = resolve_spec(str(checkpoint))
    if saved != model.spec:
        name = next(n for n in model.spec.__dataclass_fields__ if getattr(saved, n) != getattr(model.spec, n))
        ours, theirs = getattr(model.spec, name), getattr(saved, name)
        raise UserError(f"the job's model has {name} {ours}, checkpoint {checkpoint} has {theirs}; make them equal")
    load_weights(model, checkpoint)


def restore_training_state(checkpoint: Path, optimizer: MasterAdamW) -> None:
    """Load optimizer states, master weights and RNG."""
    path = checkpoint / "training" / "state.safetensors"
    tensors = _read_tensors(path)
    states = {n.removeprefix("optimizer/"): t for n, t in tensors.items() if n.startswith("optimizer/")}
    optimizer.load_state(states, str(path))
    if "rng/cpu" in tensors:
        torch.set_rng_state(tensors["rng/cpu"])
    if "rng/cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["rng/cuda"])


def _read_tensors(path: Path) -> Mapping[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is missing or damaged ({error}); resume from an older checkpoint") from None


def latest_checkpoint(run: Path) -> Path | None:
    """The newest complete checkpoint of a run, after sweeping what a kill left behind."""
    sweep(run / "checkpoints")
    found = checkpoints_of(run)
    return found[-1] if found else None
