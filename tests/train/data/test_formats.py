"""The files people have: the same rows as JSON lines, JSON, CSV, and compressed, read alike and in bounded memory."""

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest

from tightfit.errors import UserError
from tightfit.train.data import row_text
from tightfit.train.data.rows import read_rows
from tightfit.train.data.sources import find_sources
from tightfit.train.data.texts import read_texts

ROWS = [
    {"text": "one, two", "id": "1"},
    {"text": 'a "quoted"\nline', "id": "2"},
    {"text": "日本語 ✓ " * 3000, "id": "3"},
    {"text": "", "id": "4"},
]


def as_csv(delimiter: str) -> str:
    made = io.StringIO()
    writer = csv.DictWriter(made, ["text", "id"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return made.getvalue()


CONTENTS = {
    "rows.jsonl": "\n".join(map(json.dumps, ROWS)),
    "rows.json": json.dumps(ROWS, indent=2),
    "dense.json": json.dumps(ROWS, ensure_ascii=False, separators=(",", ":")),
    "lines.json": "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS),
    "rows.csv": as_csv(","),
    "rows.tsv": as_csv("\t"),
}
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".zst": lambda data: pyarrow.compress(data, "zstd", asbytes=True),
}


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("name", CONTENTS)
def test_all_formats_give_the_same_rows(
    name: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_text, "BLOCK_BYTES", 100)  # elements then end anywhere in blocks
    path = tmp_path / (name + suffix)
    path.write_bytes(COMPRESS[suffix](b"\xef\xbb\xbf" + CONTENTS[name].encode()))
    (source,) = find_sources([str(path)])
    assert [dict(row.fields) for row in read_rows(source, ["text"])] == ROWS
    assert [piece.text for piece in read_texts([source])] == [row["text"] for row in ROWS]


def test_compressed_text_is_one_document(tmp_path: Path) -> None:
    text = "".join(f"line {number}\n" for number in range(100_000))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    pieces = list(read_texts(find_sources([str(tmp_path / "a.txt.gz")])))
    assert len(pieces) > 1
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True]


BROKEN = {
    "cut.jsonl.gz": (gzip.compress(b'{"text": "a"}\n' * 9999)[:-40], "cannot be decompressed"),
    "not.jsonl.gz": (b'{"text": "a"}', "cannot be decompressed"),
    "not.jsonl.zst": (b'{"text": "a"}', "cannot be decompressed"),
    "bomb.txt.gz": (gzip.compress(bytes(2**24)), "grows to more than 200 times"),
    "bomb.txt.zst": (COMPRESS[".zst"](bytes(2**24)), "grows to more than 200 times"),
    "cut.json": (b'[{"text": "a"}, {"text": ', "element 2 is not valid JSON"),
    "open.json": (b'[{"text": "a"}', "ends within its list"),
    "numbers.json": (b"[1, 2]", "element 1 holds a JSON int"),
    "commas.json": (b'[{"text": "a"} {"text": "b"}]', "where ',' is due"),
    "one.json": (b'{\n "text": "a"\n}', "line 1 is not valid JSON"),
    "deep.json": (b"[" * 100_000, "element 1"),
    "latin.json": ("[{'text': 'caf\xe9'}]".encode("latin-1"), "not valid UTF-8"),
    "short.csv": (b"text,id\na\n", "line 2 has 1 values for 2 columns"),
    "quote.csv": (b'text\n"a', "not a row of values"),
    "names.csv": (b"text,id\n", "has no rows"),
    "twice.csv": (b"text,text\na,b\n", "names the column 'text' twice"),
    "columns.csv": (b"," * 5000, "names 5,001 columns"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_one_sentence(name: str, tmp_path: Path) -> None:
    content, message = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(read_texts(find_sources([str(tmp_path / name)])))


def test_an_element_has_a_largest_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_text, "LARGEST_ROW_BYTES", 10_000)
    (tmp_path / "a.json").write_text(json.dumps([{"text": "x" * 200_000}]))
    with pytest.raises(UserError, match="element 1 is longer than 10,000"):
        list(read_texts(find_sources([str(tmp_path / "a.json")])))


def test_the_lines_of_one_row_have_a_largest_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quotes can carry a row over any number of lines; rows that end, and empty lines, may be as many as they like."""
    monkeypatch.setattr(row_text, "LARGEST_ROW_BYTES", 1_000)
    (tmp_path / "a.csv").write_text("text\n" + '"a\n",' * 1_000)
    with pytest.raises(UserError, match="belongs to a row of more than 1,000 bytes"):
        list(read_texts(find_sources([str(tmp_path / "a.csv")])))
    (tmp_path / "b.csv").write_text("text\n" + "word\n" * 500 + "\n" * 2_000 + '"two\nlines"\n')
    assert len(list(read_texts(find_sources([str(tmp_path / "b.csv")])))) == 501
