"""Opening and decoding the files of a source, with errors that say where in the file the trouble is."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tightfit.bounded_files import require_regular
from tightfit.errors import UserError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """The file opened for reading, past a byte order mark."""
    try:
        require_regular(path)
        with path.open("rb") as file:
            if file.read(len(BYTE_ORDER_MARK)) != BYTE_ORDER_MARK:
                file.seek(0)
            yield file
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror or error}); check the file and its permissions"
        ) from error


def decode(block: bytes, path: Path, offset: int) -> str:
    """`block`, which begins at byte `offset` of `path`, as text."""
    try:
        return block.decode("utf-8")
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise UserError(f"{path} is not valid UTF-8 at byte {at}; convert it to UTF-8 (iconv -t utf-8)") from error


def text_value(value: object, field: str, where: str) -> str:
    """`value` of `field`, which must be a string."""
    if not isinstance(value, str):
        shown = "null" if value is None else type(value).__name__
        raise UserError(f"{where} has {shown} in field {field!r}; it must be a string")
    return value
