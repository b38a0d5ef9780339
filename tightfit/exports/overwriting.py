"""Exports replace files that tightfit wrote, and none that a user made or changed."""

from collections.abc import Collection
from pathlib import Path

from tightfit.bounded_files import require_regular
from tightfit.errors import UserError


def refuse_overwriting(path: Path, ours: Collection[str], remedy: str) -> None:
    """Refuse to write `path` if a file is there whose text is none of `ours`; `remedy` says what to do instead."""
    if path.exists() and not says_one_of(path, ours, remedy):
        raise UserError(f"{path} is there already and says something else; {remedy}, or remove it")


def says_one_of(path: Path, texts: Collection[str], remedy: str) -> bool:
    """Whether the file at `path` holds one of `texts`; `remedy` is for one that cannot be read."""
    wanted = [text.encode() for text in texts]
    try:
        size = require_regular(path)
        return size in map(len, wanted) and path.read_bytes() in wanted
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; {remedy}") from None
