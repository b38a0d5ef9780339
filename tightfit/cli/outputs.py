"""Files that a verb writes where the user says: one that is there and that we did not write is not overwritten."""

from collections.abc import Callable
from pathlib import Path

from tightfit.errors import UserError


def refuse_foreign(path: Path, is_ours: Callable[[Path], bool], what: str) -> None:
    """A sentence where `path` exists and is something else than `what` tightfit would write there."""
    if path.exists() and not path.is_dir() and not (path.is_file() and is_ours(path)):
        raise UserError(f"{path} exists and is not {what} that tightfit wrote; name another place or remove it first")


def is_picture(path: Path) -> bool:
    """Whether a PNG or SVG bears our name."""
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
