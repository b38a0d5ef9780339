"""What is missing or damaged in the checkpoint that a run goes on from, and which one to take instead.

Before anything is allocated: whether every file is there, those of JSON can be read, and those of tensors have the
sizes in checksums.json. The bytes of tensors are compared when they are loaded, which takes as long as reading them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tightfit.bounded_files import LARGEST_RECORD_BYTES, read_json
from tightfit.errors import UserError
from tightfit.models.base_model import BASE_FILE
from tightfit.models.files.checksums import DamagedFileError, verify
from tightfit.models.huggingface.adapter import WEIGHTS_FILE as ADAPTER_WEIGHTS
from tightfit.models.huggingface.adapter_config import CONFIG_FILE
from tightfit.models.huggingface.weights import INDEX_FILE, SINGLE_FILE
from tightfit.models.loading import has_weights
from tightfit.models.resolve import checkpoints_of

RECORDS = ("config.json", "tokenizer.json", "tokenizer_config.json", "training/state.json")
"""Files of JSON in every checkpoint."""
ADAPTER_RECORDS = (CONFIG_FILE, BASE_FILE)
"""Beside them in one of adapters."""


def refuse_damaged(checkpoint: Path) -> None:
    """Refuse a checkpoint of which a file is missing, cut short or no JSON."""
    if not _is_whole(checkpoint):
        _check(checkpoint, other_checkpoint_sentence(checkpoint))


@contextmanager
def damage_told(checkpoint: Path) -> Iterator[None]:
    """While tensors of `checkpoint` are loaded: a file that is not as it was written names a checkpoint to take."""
    try:
        yield
    except DamagedFileError as error:
        raise UserError(f"{error.what}; {other_checkpoint_sentence(checkpoint)}") from None


def other_checkpoint_sentence(checkpoint: Path) -> str:
    """The end of an error message about an unusable checkpoint: the newest whole one of the others."""
    found = checkpoints_of(checkpoint.parent.parent)
    for other in reversed(found):
        if other.name != checkpoint.name and _is_whole(other):
            age = "an older" if other.name < checkpoint.name else "a newer"
            return f"resume from {age} checkpoint with --from {other.name}"
    return "there is no other whole checkpoint of the run, so start it anew with --overwrite"


def _is_whole(checkpoint: Path) -> bool:
    try:
        _check(checkpoint, "")
    except UserError:
        return False
    return True


def _check(checkpoint: Path, remedy: str) -> None:
    """Raise a UserError that names the first bad file and ends with `remedy`."""
    is_adapter = any((checkpoint / name).exists() for name in (ADAPTER_WEIGHTS, *ADAPTER_RECORDS))
    is_in_files = (checkpoint / INDEX_FILE).exists()
    for name in (*RECORDS, *(ADAPTER_RECORDS if is_adapter else ()), *((INDEX_FILE,) if is_in_files else ())):
        if not (checkpoint / name).is_file():
            raise UserError(f"{checkpoint / name} is missing; {remedy}")
        read_json(checkpoint / name, LARGEST_RECORD_BYTES, "a record of a checkpoint", remedy=remedy)
    try:
        verify(checkpoint, contents=False)
    except DamagedFileError as error:
        raise UserError(f"{error.what}; {remedy}") from None
    if not has_weights(str(checkpoint)):
        raise UserError(f"{checkpoint} has none of {SINGLE_FILE}, {INDEX_FILE} and sharded/.metadata; {remedy}")
