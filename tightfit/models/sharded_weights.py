"""Weights in the pieces in which ranks held them: the `sharded` folder of a checkpoint (torch.distributed.checkpoint).

Every piece says which part of which tensor it is, so any layout, and a single process, can read what it needs: no rank
talks to another, and none holds more than its own part. Tensors are called as ours are, behind a prefix.
Its index is a pickle, which can run code when it is read: read your own. To give a model away, export it.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from tightfit.errors import UserError
from tightfit.models.decoder import Decoder

FOLDER = "sharded"
PREFIX = "weights/"


def weights_of(model: Decoder) -> dict[str, Tensor]:
    """The weights that are here, by the names they are stored under; a tied output projection is the embedding."""
    own = model.state_dict()
    tied = model.spec.tied
    return {f"{PREFIX}{name}": tensor for name, tensor in own.items() if not (tied and name == "head.weight")}


def load_sharded_weights(model: Decoder, checkpoint: Path) -> None:
    """Fill what is here of `model`, cast to its dtype."""
    read_pieces(weights_of(model), checkpoint)


def read_pieces(wanted: Mapping[str, Tensor], checkpoint: Path) -> None:
    """Fill these tensors, or the parts of them that are here, in place."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is meant
            load(dict(wanted), checkpoint_id=checkpoint / FOLDER, no_dist=True)
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{checkpoint / FOLDER} is damaged or of another model ({reason}); resume from an older one"
        ) from None
