"""One writer per output: the writer holds a lock, and other processes are told which process holds it.

The lock is the kernel's (flock), so a killed process loses it. Of several ranks the first one holds it. Where a file
system has no locks, work goes on without. The lock file names its holder: process, host, since when. A run's lock file
is in its directory; that of another file or directory is beside it under a hidden name.
"""

import errno
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tightfit.errors import UserError

LOCK_FILE = ".lock"
MOST_BYTES = 4096
NAMING_S = 2.0
"""How long to wait for a holder to write its name into the lock file."""


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of `directory`, which exists; the lock file is removed afterwards."""
    with _locked(directory / LOCK_FILE, directory):
        yield


@contextmanager
def locked_beside(output: Path) -> Iterator[None]:
    """Hold the lock of `output`, which need not exist, but its directory must; for a link, the lock of its target."""
    end = output.resolve()
    with _locked(end.parent / f"{LOCK_FILE}-{end.name}", output):
        yield


@contextmanager
def _locked(path: Path, output: Path) -> Iterator[None]:
    descriptor = _taken(path, output)
    try:
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with suppress(OSError):  # on a full disk the lock is nameless
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)


def refuse_if_locked(directory: Path) -> None:
    """Refuse a `directory` whose lock another process holds; nothing is written."""
    path = directory / LOCK_FILE
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would be waited for
    except OSError:
        return
    try:
        _flock(descriptor, path, directory)
    finally:
        os.close(descriptor)


def _taken(path: Path, output: Path) -> int:
    """A descriptor that holds the lock of the file at `path`: of the present one, not of one removed meanwhile."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link, which may lead to anybody's file
                raise _foreign(path) from None
            raise UserError(f"cannot write output {output}: {error.strerror}; choose a writable directory") from error
        try:
            _flock(descriptor, path, output)
            if os.fstat(descriptor).st_ino == os.stat(path).st_ino:
                _refuse_foreign(descriptor, path)
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _refuse_foreign(descriptor: int, path: Path) -> None:
    """Refuse a file that is no lock of ours, as locking would overwrite and remove it."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode) or not _is_ours(os.pread(descriptor, MOST_BYTES, 0)):
        raise _foreign(path)


def _foreign(path: Path) -> UserError:
    return UserError(f"{path} is there and is no lock of tightfit; remove it, or choose another output")


def _is_ours(content: bytes) -> bool:
    if not content.strip(b"\0"):  # not named yet, or on a full disk
        return True
    try:
        return json.loads(content).keys() == {"pid", "host", "since"}
    except (ValueError, AttributeError):
        return False


def _flock(descriptor: int, path: Path, output: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"{output} is being written by {_holder(path)}; wait for it, stop it, or choose another output"
        ) from None
    except OSError:  # no locks on this file system
        return


def _holder(path: Path) -> str:
    """The process that holds the lock, in words; one that has just taken it gets a moment to write its name."""
    limit = time.monotonic() + NAMING_S
    while time.monotonic() < limit:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return f"process {int(found['pid'])} on {found['host']} since {found['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            time.sleep(0.02)
    return "another process"
