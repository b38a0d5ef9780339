"""Files compressed with gzip or Zstandard, decompressed while they are read, a block at a time.

A few kB can hold gigabytes: a file that grows to more than `MOST_EXPANSION` times its size is refused, as no text does.
Zstandard is read by pyarrow, which the training install has.
"""

import gzip
import io
import zlib
from pathlib import Path
from typing import Any

from tightfit.errors import UserError

SUFFIXES = (".gz", ".zst")
MOST_EXPANSION = 200
FREE_BYTES = 2**20
"""Bytes that any file may grow to: short lines repeated in a small file compress well."""
USUAL_EXPANSION = 4
"""Typical ratio for text, from which progress is estimated."""


def is_compressed(path: Path) -> bool:
    """Whether the file's suffix is one of SUFFIXES."""
    return path.suffix.lower() in SUFFIXES


def inner_name(path: Path) -> Path:
    """The path without its suffix of compression."""
    return path.with_suffix("") if is_compressed(path) else path


def open_compressed(path: Path) -> io.BufferedReader:
    """The decompressed content of `path`, opened for reading."""
    inside: Any = gzip.GzipFile(path, "rb") if path.suffix.lower() == ".gz" else _zstandard(path)
    return io.BufferedReader(_Bounded(inside, path))


def _zstandard(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"{path} needs the package pyarrow to be read; run: pip install pyarrow") from None
    return pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")


class _Bounded(io.RawIOBase):
    """A stream of decompressed bytes that raises UserErrors and refuses to grow beyond its bound."""

    def __init__(self, inside: Any, path: Path) -> None:
        self.inside, self.path, self.position = inside, path, 0
        self.most = FREE_BYTES + MOST_EXPANSION * path.stat().st_size

    def readable(self) -> bool:
        """Always True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer`."""
        try:
            block = self.inside.read(len(buffer))
        except (OSError, EOFError, zlib.error, ValueError) as error:  # Arrow's errors are OSErrors and ValueErrors
            raise UserError(f"{self.path} cannot be decompressed ({error}); fetch or compress it again") from None
        self.position += len(block)
        if self.position > self.most:
            raise UserError(
                f"{self.path} grows to more than {MOST_EXPANSION} times its size, as no text does; decompress it first"
            )
        buffer[: len(block)] = block
        return len(block)

    def tell(self) -> int:
        """Decompressed bytes read so far."""
        return self.position

    def close(self) -> None:
        """Close this stream and the compressed one."""
        if not self.closed:
            self.inside.close()
        super().close()
