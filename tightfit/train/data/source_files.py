"""Opening and decoding the files of a source, with errors that name the place in the file."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from tightfit.bounded_files import require_regular
from tightfit.errors import UserError
from tightfit.train.data.compressed import is_compressed, open_compressed

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@contextmanager
def open_bytes(path: Path) -> Iterator[BufferedReader]:
    """The file, decompressed if need be, opened for reading after its byte order mark, if any."""
    try:
        require_regular(path)
        with open_compressed(path) if is_compressed(path) else path.open("rb") as file:
            if file.peek(len(BYTE_ORDER_MARK))[: len(BYTE_ORDER_MARK)] == BYTE_ORDER_MARK:
                file.read(len(BYTE_ORDER_MARK))
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
