"""Exports replace files that tightfit wrote, and none that a user made or changed."""

from collections.abc import Collection
from pathlib import Path

from tightfit.bounded_files import require_regular
from tightfit.errors import UserError


def refuse_overwriting(path: Path, ours: Collection[str], remedy: str) -> None:
    """Refuse to write `path` if a file is there whose text is none of `ours`; `remedy` says what to do instead."""
    if not path.exists():
        return
    texts = [text.encode() for text in ours]
    try:
        size = require_regular(path)
        is_ours = size in map(len, texts) and path.read_bytes() in texts
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; {remedy}") from None
    if not is_ours:
        raise UserError(f"{path} is there already and says something else; {remedy}, or remove it")
