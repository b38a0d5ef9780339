"""Keeps a verb from overwriting, at a path that the user gives, an existing file that tightfit did not write."""

from collections.abc import Callable
from pathlib import Path

from tightfit.errors import UserError

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth")
"""Endings of files of weights that are no GGUF; what is written is a directory that holds some."""


def refuse_foreign(path: Path, is_ours: Callable[[Path], bool], what: str) -> None:
    """Refuse a `path` that exists and is not `what` tightfit would write there."""
    if path.exists() and not path.is_dir() and not (path.is_file() and is_ours(path)):
        raise UserError(f"{path} exists and is not {what} that tightfit wrote; name another place or remove it first")


def is_picture(path: Path) -> bool:
    """Whether a PNG or SVG names tightfit as the program that wrote it."""
    from tightfit.report.figure import SOFTWARE

    try:
        with path.open("rb") as file:
            return SOFTWARE.encode() in file.read(4096)
    except OSError:
        return False


def is_ledger(path: Path) -> bool:
    """Whether `tightfit measure` wrote it."""
    from tightfit.bounded_files import LARGEST_RECORD_BYTES, read_json

    try:
        return {"source", "lines"} <= read_json(path, LARGEST_RECORD_BYTES, "a ledger", remedy="").keys()
    except (UserError, AttributeError):
        return False
