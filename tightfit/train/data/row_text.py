"""Rows with named fields in files of text: JSON lines, JSON documents and comma-separated values, streamed.

The length of a line, or of an element of a list, is limited, so memory stays bounded whatever the file.
"""

import codecs
import csv
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tightfit.errors import UserError
from tightfit.train.data.source_files import decode, open_bytes

LARGEST_ROW_BYTES = 50_000_000
"""The longest line of JSON, whose Python objects can take some 24 times as much memory."""
MOST_COLUMNS = 1_000
BLOCK_BYTES = 2**16
SPACE = " \t\r\n"


class TextRow(NamedTuple):
    """The fields of one row, its place in the file (for messages), and its bytes."""

    fields: dict[str, Any]
    where: str
    row_bytes: int


def json_lines(path: Path) -> Iterator[TextRow]:
    """One object a line; empty lines are skipped."""
    with open_bytes(path) as file:
        for number, offset, line in _lines(file, path):
            text = decode(line, path, offset)
            if text.strip():
                where = f"{path} line {number}"
                yield TextRow(_object(text, where, "that line"), where, len(line))


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Number, byte offset and content of every line."""
    offset = file.tell()
    for number, line in enumerate(iter(partial(file.readline, LARGEST_ROW_BYTES + 1), b""), start=1):
        if len(line) > LARGEST_ROW_BYTES:
            raise UserError(
                f"{path} line {number} is longer than {LARGEST_ROW_BYTES:,} bytes; cut it up, or put the text into "
                "a file of its own"
            )
        yield number, offset, line
        offset += len(line)


def json_document(path: Path) -> Iterator[TextRow]:
    """The objects of a JSON list or, where the file does not begin with one, of JSON lines."""
    with open_bytes(path) as file:
        beginning = file.peek(BLOCK_BYTES).lstrip()
    if beginning.startswith(b"["):
        return _listed(path)
    return json_lines(path)


def _listed(path: Path) -> Iterator[TextRow]:
    with open_bytes(path) as file:
        text = _Text(file, path)
        text.skip("[")
        number = 0
        while text.peek() != "]":
            number += 1
            where = f"{path} element {number}"
            before = text.taken
            fields = text.element(where)
            yield TextRow(fields, where, text.taken - before)
            if text.peek() != "]":
                text.skip(",")


class _Text:
    """The text of a JSON document, read in blocks."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path, self.buffer, self.position = file, path, "", 0
        self.taken = 0
        self._decode: Callable[..., str] = codecs.getincrementaldecoder("utf-8")().decode

    def peek(self) -> str:
        """The next character that is not white space."""
        while True:
            while self.position < len(self.buffer) and self.buffer[self.position] in SPACE:
                self.position += 1
            if self.position < len(self.buffer):
                return self.buffer[self.position]
            if not self._more(BLOCK_BYTES):
                raise UserError(f"{self.path} ends within its list; write or fetch it again")

    def skip(self, mark: str) -> None:
        """Move past `mark`, which must come next."""
        if (found := self.peek()) != mark:
            raise UserError(f"{self.path} has {found!r} where {mark!r} is due in its list; write it as JSON")
        self.position += 1

    def element(self, where: str) -> dict[str, Any]:
        """The next object; reads double in size, so a long object takes a logarithmic number of parses."""
        self.peek()
        wanted = BLOCK_BYTES
        while True:
            try:
                # The value is not kept: it can be large.
                end = json.JSONDecoder().raw_decode(self.buffer, self.position)[1]
            except (ValueError, RecursionError):
                end = None
            if end is not None and end < len(self.buffer):
                break
            if len(self.buffer) - self.position > LARGEST_ROW_BYTES:
                raise UserError(f"{where} is longer than {LARGEST_ROW_BYTES:,} characters, or not JSON; cut it up")
            if not self._more(wanted):
                break
            wanted *= 2
        fields = _object(self.buffer[self.position : end], where, "it")
        self.position = len(self.buffer) if end is None else end
        return fields

    def _more(self, count: int) -> bool:
        block = self.file.read(count)
        self.taken += len(block)
        try:
            text = self._decode(block, final=not block)
        except UnicodeDecodeError:
            raise UserError(f"{self.path} is not valid UTF-8; convert it to UTF-8 (iconv -t utf-8)") from None
        self.buffer, self.position = self.buffer[self.position :] + text, 0
        return bool(block)


def separated_values(path: Path, delimiter: str) -> Iterator[TextRow]:
    """Rows below a line of names; values may be quoted and hold line breaks."""
    csv.field_size_limit(LARGEST_ROW_BYTES)
    with open_bytes(path) as file:
        lines = _RowLines(file, path)
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        names: list[str] | None = None
        before = 0
        while (values := _values(reader, path)) is not None:
            where = f"{path} line {reader.line_num}"
            lines.begin_row()
            if names is None:
                names = _column_names(values, where)
            elif len(values) != len(names):
                raise UserError(f"{where} has {len(values)} values for {len(names)} columns; correct that line")
            else:
                yield TextRow(dict(zip(names, values, strict=True)), where, file.tell() - before)
            before = file.tell()


class _RowLines:
    """Lines of a table; the total length of one row, which quotes can stretch over many lines, is limited."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.path, self.row_bytes = path, 0
        self._lines = _lines(file, path)

    def begin_row(self) -> None:
        """Count the bytes of a new row from here."""
        self.row_bytes = 0

    def __iter__(self) -> Iterator[str]:
        for number, offset, line in self._lines:
            self.row_bytes += len(line.strip())  # empty lines are no part of a row
            if self.row_bytes > LARGEST_ROW_BYTES:
                raise UserError(
                    f"{self.path} line {number} belongs to a row of more than {LARGEST_ROW_BYTES:,} bytes; "
                    "look for a quotation mark that is never closed"
                )
            yield decode(line, self.path, offset)


def _column_names(names: list[str], where: str) -> list[str]:
    if len(names) > MOST_COLUMNS:
        raise UserError(f"{where} names {len(names):,} columns, more than {MOST_COLUMNS:,}; it is not a table of texts")
    if twice := next((name for name in names if name and names.count(name) > 1), None):
        raise UserError(f"{where} names the column {twice!r} twice; rename one of the two")
    return names


def _values(reader: Any, path: Path) -> list[str] | None:
    """The values of the next row that is not empty; None at the end."""
    try:
        return next((values for values in reader if values), None)
    except csv.Error as error:
        raise UserError(f"{path} line {reader.line_num} is not a row of values ({error}); correct that line") from None


def _object(text: str, where: str, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not valid JSON ({error.msg} at column {error.colno}); correct {what}") from error
    except RecursionError as error:
        raise UserError(f"{where} is nested too deeply to be read as JSON; flatten or remove {what}") from error
    except ValueError as error:  # a number of thousands of digits
        raise UserError(f"{where} holds a number that is too long; correct {what}") from error
    if not isinstance(value, dict):
        raise UserError(f"{where} holds a JSON {type(value).__name__}; each line must be an object with named fields")
    return value
