"""Directories and files that exist whole or not at all, whatever instant the process is killed at.

Everything is written under a hidden temporary name beside the target, flushed to the disk (files, then directories),
and renamed; the rename is the moment it comes to be. Readers ignore hidden names; leftovers of a kill are swept later.
"""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY_PREFIX = ".partial-"
DISCARDED_PREFIX = ".discarded-"


@contextmanager
def durable_directory(target: Path) -> Iterator[Path]:
    """A directory to fill, which becomes `target` on a clean exit; on an exception nothing of it remains."""
    temporary = target.parent / f"{TEMPORARY_PREFIX}{target.name}-{uuid.uuid4().hex[:8]}"
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary.mkdir()
    try:
        yield temporary
        flush_tree(temporary)
        os.rename(temporary, target)
        flush(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def durable_file(target: Path) -> Iterator[Path]:
    """The path of a file to write, which replaces `target` on a clean exit."""
    temporary = target.parent / f"{TEMPORARY_PREFIX}{target.name}-{uuid.uuid4().hex[:8]}"
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        flush(temporary)
        os.replace(temporary, target)
        flush(target.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def discard_directory(target: Path) -> None:
    """Remove `target`; it disappears at once by a rename, so a kill never leaves half of it under its own name."""
    hidden = target.parent / f"{DISCARDED_PREFIX}{target.name}-{uuid.uuid4().hex[:8]}"
    os.rename(target, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Remove what killed processes left half-written or half-removed in `parent`, where only one process writes."""
    if not parent.is_dir():
        return
    for leftover in parent.iterdir():
        if leftover.name.startswith((TEMPORARY_PREFIX, DISCARDED_PREFIX)):
            shutil.rmtree(leftover, ignore_errors=True) if leftover.is_dir() else leftover.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Force a file's or directory's contents to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(directory: Path) -> None:
    """The same for everything below a directory."""
    for folder, _, files in os.walk(directory, topdown=False):
        for name in files:
            flush(Path(folder) / name)
        flush(Path(folder))
