"""Directories and files that exist whole or not at all, whatever instant the process is killed at.

Everything is written under a hidden temporary name beside the target, flushed to the disk (files, then directories),
and renamed; it exists from the rename on. Readers ignore hidden names. What a killed process leaves is swept by the
next writer of the same target: a writer holds a lock on its temporary (flock, which the kernel drops with the process),
so a temporary without a lock is abandoned. On a file system without locks it stays until `sweep`.
"""

import errno
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tightfit.errors import UserError

TEMPORARY_PREFIX = ".partial-"
DISCARDED_PREFIX = ".discarded-"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a disk without room: at all, within the user's quota, or for a file of this size."""
YOUNG_S = 60.0
"""A younger temporary may not have its lock yet, so it is not swept."""


def place_of(target: Path) -> Path:
    """The path that is written for `target`: if it is a link, where it leads, so that the link stays."""
    return Path(os.path.realpath(target)) if target.is_symlink() else target


def require_new(target: Path) -> None:
    """Refuse a `target` that exists already, even as a broken link, or that cannot be created."""
    if os.path.lexists(target):
        raise UserError(f"{target} exists already; name a new place or remove it first")
    refuse_unwritable(target.parent, target)


def refuse_unwritable(directory: Path, output: Path) -> None:
    """Refuse an `output` that cannot be written into `directory`: judged, without writing, by its nearest existing
    parent."""
    place = directory
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise UserError(f"cannot write output {output}: {place} is not a directory; choose a writable directory")
    if not os.access(place, os.W_OK | os.X_OK):
        on_read_only_disk = os.statvfs(place).f_flag & os.ST_RDONLY
        why = f"the disk of {place} is read-only" if on_read_only_disk else f"no permission to write in {place}"
        raise UserError(f"cannot write output {output}: {why}; choose a writable directory")


@contextmanager
def durable_directory(target: Path) -> Iterator[Path]:
    """A directory to fill, which becomes `target` on a clean exit; on an exception nothing of it remains."""
    temporary = target.parent / f"{TEMPORARY_PREFIX}{target.name}-{uuid.uuid4().hex[:8]}"
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep_abandoned(target)
    temporary.mkdir()
    lock = _take_lock(temporary)
    try:
        yield temporary
        flush_tree(temporary)
        os.rename(temporary, target)
        flush(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(lock)


@contextmanager
def durable_file(target: Path) -> Iterator[Path]:
    """The path of a file to write, which replaces `target`, or the file that this links to, on a clean exit."""
    target = place_of(target)
    temporary = target.parent / f"{TEMPORARY_PREFIX}{target.name}-{uuid.uuid4().hex[:8]}"
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep_abandoned(target)
    temporary.touch(exist_ok=False)
    lock = _take_lock(temporary)
    try:
        yield temporary
        flush(temporary)
        os.replace(temporary, target)
        flush(target.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(lock)


def write_text(target: Path, text: str, *, remedy: str, what: str = "", executable: bool = False) -> None:
    """Write `text` to `target`, whole or not at all; a failure is a UserError that ends with `remedy`."""
    try:
        with durable_file(target) as temporary:
            temporary.write_text(text, encoding="utf-8")
            if executable:
                temporary.chmod(0o755)
    except OSError as error:
        raise UserError(f"cannot write {what}{target}: {error.strerror}; {remedy}") from None


def discard_directory(target: Path) -> None:
    """Remove `target`; it disappears at once by a rename, so a kill never leaves half of it under its own name."""
    hidden = target.parent / f"{DISCARDED_PREFIX}{target.name}-{uuid.uuid4().hex[:8]}"
    os.rename(target, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def sweep_abandoned(target: Path) -> None:
    """Remove what killed processes left of earlier attempts to write or remove `target`."""
    prefixes = (f"{TEMPORARY_PREFIX}{target.name}-", f"{DISCARDED_PREFIX}{target.name}-")
    with suppress(OSError):
        for leftover in [path for path in target.parent.iterdir() if path.name.startswith(prefixes)]:
            if time.time() - leftover.stat().st_mtime > YOUNG_S and _is_abandoned(leftover):
                _remove(leftover)


def _take_lock(temporary: Path) -> int:
    """A descriptor that holds the lock of `temporary`, if the file system has locks."""
    descriptor = os.open(temporary, os.O_RDONLY)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _is_abandoned(leftover: Path) -> bool:
    descriptor = os.open(leftover, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _remove(leftover: Path) -> None:
    shutil.rmtree(leftover, ignore_errors=True) if leftover.is_dir() else leftover.unlink(missing_ok=True)


def sweep(parent: Path) -> None:
    """Remove what killed processes left half-written or half-removed in `parent`, where only one process writes."""
    if not parent.is_dir():
        return
    for leftover in parent.iterdir():
        if leftover.name.startswith((TEMPORARY_PREFIX, DISCARDED_PREFIX)):
            _remove(leftover)


def flush(path: Path) -> None:
    """Force a file's or directory's contents to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(directory: Path) -> None:
    """Flush everything below a directory to the disk."""
    for folder, _, files in os.walk(directory, topdown=False):
        for name in files:
            flush(Path(folder) / name)
        flush(Path(folder))
