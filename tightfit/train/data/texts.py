"""Documents of plain text, streamed from any source.

A file of text is one document, a row is one document. A document is yielded as pieces of bounded size, so that one
larger than memory can be tokenised, on all cores; only the last piece ends the document. Pieces are cut between two
lines without other white space around the line break: common pre-tokenizers split there anyway.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import AnyStr

from tightfit.train.data.compressed import USUAL_EXPANSION, is_compressed
from tightfit.train.data.rows import Row, missing_fields, read_rows
from tightfit.train.data.source_files import decode, open_bytes, text_value
from tightfit.train.data.sources import Source

PIECE_BYTES = 2**19

LINE_BORDER = re.compile(rb"(?<=\S\n)(?=\S)")
TEXT_BORDER = re.compile(LINE_BORDER.pattern.decode())


@dataclass(frozen=True)
class Piece:
    """Text, its place in the source, whether its document ends with it, and its share of the bytes (for progress)."""

    text: str
    where: str
    is_last: bool
    source_bytes: float


def read_texts(sources: Sequence[Source], field: str = "text") -> Iterator[Piece]:
    """The documents of `sources` in order; a row's document is the text in `field`."""
    for source in sources:
        match source.kind:
            case "text":
                yield from _file(source.path)
            case "topics":
                yield from _topics()
            case _:
                yield from _rows(source, field)


def _rows(source: Source, field: str) -> Iterator[Piece]:
    for row in read_rows(source, [field]):
        if field not in row.fields:
            raise missing_fields(row.where, [field], list(row.fields))
        yield from _pieces(text_value(row.fields[field], field, row.where), row)


def _pieces(text: str, row: Row) -> Iterator[Piece]:
    """A row's text as one piece if it is short, else as several."""
    if len(text) <= PIECE_BYTES:
        yield Piece(text, row.where, True, row.source_bytes)
        return
    start = 0
    while len(text) - start > PIECE_BYTES:
        block = text[start : start + PIECE_BYTES]
        cut = _cut(block, TEXT_BORDER, "\n", " ")
        yield Piece(block[:cut], row.where, False, row.source_bytes * cut / len(text))
        start += cut
    yield Piece(text[start:], row.where, True, row.source_bytes * (len(text) - start) / len(text))


def _topics() -> Iterator[Piece]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield Piece(topics[name], f"topic {name!r} of pydoc_data", True, len(topics[name]))


def _file(path: Path) -> Iterator[Piece]:
    expansion = USUAL_EXPANSION if is_compressed(path) else 1
    with open_bytes(path) as file:
        offset, block = file.tell(), file.read(PIECE_BYTES)
        while following := file.read(PIECE_BYTES):
            cut = _cut_bytes(block)
            yield Piece(decode(block[:cut], path, offset), str(path), False, cut / expansion)
            offset, block = offset + cut, block[cut:] + following
        yield Piece(decode(block, path, offset), str(path), True, len(block) / expansion)


def _cut(block: AnyStr, border: re.Pattern[AnyStr], line_break: AnyStr, space: AnyStr) -> int:
    """Where to end a piece: between two unindented lines, else after a line, else before a space, else at its end."""
    if found := max((match.start() for match in border.finditer(block, len(block) // 2)), default=0):
        return found
    if line := block.rfind(line_break) + 1:
        return line
    return at if (at := block.rfind(space)) > 0 else len(block)


def _cut_bytes(block: bytes) -> int:
    """Where to end a piece of bytes: as `_cut`, but never within a character."""
    cut = _cut(block, LINE_BORDER, b"\n", b" ")
    if cut < len(block):
        return cut
    cut -= 1
    while cut > len(block) - 4 and block[cut] & 0xC0 == 0x80:  # a byte inside a character
        cut -= 1
    return cut
