"""Reads whole files within a limit: only regular files (or pipes), and at most a given number of bytes.

A name can lead to `/dev/zero`, which never ends, or to a file a thousand times larger than anything sensible. The kind
of a file is therefore checked first, and never more than the limit is read: memory and time are bounded by a number in
our source, not by what a file contains.
"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, TextIO

from tightfit.errors import UserError

BLOCK_BYTES = 2**20
LARGEST_RECORD_BYTES = 64 * 2**20
"""The limit for JSON files that we write ourselves: plans, ledgers, records of a run."""


def user_path(name: str | Path, what: str) -> Path:
    """The path a user wrote, with `~` followed; `what` says where it was written."""
    text = os.fspath(name)
    shown = text if len(text) <= 100 else f"{text[:100]}…"
    if not text:  # which would be the working directory
        raise UserError(f"{what} is an empty name; write it out, or . for the working directory")
    try:
        path = Path(text).expanduser()
        os.lstat(path)  # the file system's own limits on names
    except RuntimeError:
        raise UserError(f"{what} {shown!r} begins with a home directory that does not exist; write it out") from None
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # reported where it is opened
    except (OSError, ValueError):  # a null byte, a lone surrogate, a name too long, a loop of links
        raise UserError(f"{what} {shown!r} is not a name that a file here can have; choose another") from None
    return path


def require_regular(path: Path) -> int:
    """The size of `path`, which must be a regular file; OSError where it is missing or a directory."""
    found = _stat(path)
    _refuse(path, found.st_mode, stat.S_ISREG(found.st_mode))
    return found.st_size


def read_bounded(path: Path, most_bytes: int, what: str) -> bytes:
    """All of `path`, which is `what` (such as "a model config"); OSError where it cannot be read."""
    mode = _stat(path).st_mode
    _refuse(path, mode, stat.S_ISREG(mode) or stat.S_ISFIFO(mode))
    content = bytearray()  # a read of `most_bytes` at once would allocate them
    with path.open("rb") as file:
        while len(content) <= most_bytes and (block := file.read(BLOCK_BYTES)):
            content += block
    if len(content) > most_bytes:
        raise UserError(f"{path} is larger than {_size(most_bytes)}, which {what} never is; check the name")
    return bytes(content)


def read_text(stream: TextIO | None, most_characters: int = 16 * 2**20) -> str:
    """All of `stream`, which may never end; a UserError beyond the limit, and for None, a closed standard input."""
    if stream is None:
        raise UserError("the standard input is closed; give text")
    try:
        text = stream.read(most_characters + 1)
    except OSError as error:
        raise UserError(f"cannot read the standard input: {error.strerror}; give text") from None
    except UnicodeDecodeError:
        raise UserError("the standard input is not UTF-8 text; give text") from None
    if len(text) > most_characters:
        raise UserError(f"the standard input is longer than {most_characters:,} characters; give less")
    return text


def read_json(path: Path, most_bytes: int, what: str, *, remedy: str) -> Any:
    """The JSON value in `path`; every failure is a UserError that ends with `remedy`."""
    try:
        return json.loads(read_bounded(path, most_bytes, what).decode("utf-8"))
    except OSError as error:
        noun = what.partition(" ")[2]  # without its article
        raise UserError(f"cannot read {noun} {path}: {error.strerror}; {remedy}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        reason = "too deeply nested" if isinstance(error, RecursionError) else str(error).split("\n", 1)[0]
        raise UserError(f"{path} is not JSON ({reason}); {remedy}") from None


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except ValueError:  # a null byte
        raise UserError(f"{str(path)!r} is not a name that a file can have; choose another") from None


def _refuse(path: Path, mode: int, is_good: bool) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not is_good:
        raise UserError(f"{path} is {_kind(mode)} and not a regular file; copy its contents to one")


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFCHR: "a character device",
        stat.S_IFBLK: "a block device",
        stat.S_IFSOCK: "a socket",
        stat.S_IFIFO: "a pipe",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count:,} bytes"
