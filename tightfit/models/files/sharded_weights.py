"""Sharded weights: the `sharded` folder of a checkpoint (torch.distributed.checkpoint), one shard per rank.

The index says which region of which tensor a shard is, so ranks of any layout, and a single process, can load it:
without communication, and without holding more than their own shards. Tensor names are the decoder's behind a prefix.
The index is a pickle; piece_reader.py reads it without running code.
"""

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.files.piece_reader import PieceReader

FOLDER = "sharded"
PREFIX = "weights/"


def weights_of(model: Decoder, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """This rank's weights by stored name; a tied output projection is stored as the embedding only.

    `state` takes the place of the model's own state dict.
    """
    own = model.state_dict() if state is None else state
    tied = model.spec.tied
    return {f"{PREFIX}{name}": tensor for name, tensor in own.items() if not (tied and name == "head.weight")}


def load_sharded_weights(model: Decoder, checkpoint: Path) -> None:
    """Load this rank's weights of `model`, cast to its dtype."""
    read_pieces(weights_of(model), checkpoint)


def open_pieces(checkpoint: Path) -> PieceReader:
    """A reader that has read the index; torch 2.11 would not say what is wrong with a damaged one."""
    try:
        return PieceReader(checkpoint / FOLDER)
    except (OSError, ValueError) as error:
        raise _damaged(checkpoint, error) from None


def read_pieces(wanted: Mapping[str, Tensor], checkpoint: Path, reader: PieceReader | None = None) -> None:
    """Load the tensors `wanted`, by stored name, in place; of DTensors, this rank's shards."""
    reader = reader or open_pieces(checkpoint)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended
            load(dict(wanted), storage_reader=reader, no_dist=True)
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise _damaged(checkpoint, error) from None


def stored_tensors(checkpoint: Path, reader: PieceReader | None = None) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Dtype and shape of every whole tensor, by stored name."""
    index = (reader or open_pieces(checkpoint)).index.state_dict_metadata
    return {name: (entry.properties.dtype, entry.size) for name, entry in index.items()}  # type: ignore[union-attr]


def _damaged(checkpoint: Path, error: BaseException) -> UserError:
    failures = getattr(error, "failures", {})  # torch hides the reason among those of ranks
    reason = str(next(iter(failures.values()))[0] if failures else error).splitlines()
    told = reason[0] if reason else type(error).__name__
    return UserError(f"{checkpoint / FOLDER} is damaged or of another model ({told}); resume from an older one")
