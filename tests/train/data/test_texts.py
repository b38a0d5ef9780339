"""Documents of text: borders, pieces of large files, and bad bytes."""

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

from tightfit.errors import UserError
from tightfit.train.data import texts
from tightfit.train.data.sources import find_sources
from tightfit.train.data.texts import read_texts


def test_a_file_is_a_document_and_a_row_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("﻿zwölf\r\nBoxkämpfer".encode())
    (tmp_path / "b.jsonl").write_text('{"body": "x"}\n{"body": ""}\n')
    pieces = list(read_texts(find_sources([str(tmp_path)]), "body"))
    assert [piece.text for piece in pieces] == ["zwölf\r\nBoxkämpfer", "x", ""]
    assert all(piece.is_last for piece in pieces)
    assert [piece.where for piece in pieces] == [
        str(tmp_path / "a.txt"),
        f"{tmp_path / 'b.jsonl'} line 1",
        f"{tmp_path / 'b.jsonl'} line 2",
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"body": "x", "id": 3}, r"line 1 has no field 'text' \(it has 'body', 'id'\); name the field that holds"),
        (
            {"messages": []},
            r"no field 'text' but a conversation \(it has 'messages'\); train on it with objective: sft",
        ),
        ({"prompt": "", "completion": ""}, "objective: sft"),
        ({}, r"line 1 has no field 'text' \(it has none at all\)"),
        ({"text": None}, r"line 1 has null in field 'text'; it must be a string"),
        ({"text": ["a"]}, r"line 1 has list in field 'text'; it must be a string"),
    ],
)
def test_rows_without_text_are_refused(tmp_path: Path, row: dict[str, object], message: str) -> None:
    (tmp_path / "b.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match=message):
        list(read_texts(find_sources([str(tmp_path)])))


def test_invalid_utf8_says_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_bytes(b"line\n" * 30 + b"caf\xe9\n" + b"line\n" * 30)
    for size in (texts.PIECE_BYTES, 16):
        monkeypatch.setattr(texts, "PIECE_BYTES", size)
        with pytest.raises(UserError, match=r"a\.txt is not valid UTF-8 at byte 153; convert it"):
            list(read_texts(find_sources([str(tmp_path)])))


@pytest.mark.parametrize("alphabet", ["ab \n", "ab é\n", "äß😀", "a ", "\n"])
def test_pieces_of_a_large_file_are_bounded_and_join_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alphabet: str
) -> None:
    monkeypatch.setattr(texts, "PIECE_BYTES", 16)
    chance = random.Random(0)
    for length in (1, 15, 16, 17, 31, 32, 33, 300):
        text = "".join(chance.choice(alphabet) for _ in range(length))
        (tmp_path / "a.txt").write_text(text, newline="")
        pieces = list(read_texts(find_sources([str(tmp_path)])))
        assert "".join(piece.text for piece in pieces) == text
        assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert max(len(piece.text.encode()) for piece in pieces) <= 2 * 16 + 16
        assert sum(piece.source_bytes for piece in pieces) == len(text.encode())


def test_pieces_end_between_unindented_lines_where_they_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "PIECE_BYTES", 64)
    (tmp_path / "a.txt").write_text("def f():\n    return 1\n\n\nx = f()\ny = 2\n    \n" * 20)
    pieces = list(read_texts(find_sources([str(tmp_path)])))
    assert len(pieces) > 5
    for before, after in pairwise(pieces):
        assert before.text[-1] == "\n"
        assert not before.text[-2].isspace()
        assert not after.text[0].isspace()


def test_the_standard_library_reads_from_end_to_end() -> None:
    sources = find_sources(["stdlib"])
    pieces = list(read_texts(sources))
    prose = [piece for piece in pieces if piece.where.startswith("topic ")]
    assert sum(len(piece.text) for piece in prose) > 300_000
    assert len(pieces) == len(prose) + len(sources) - 1
    assert [piece.where for piece in prose] == sorted(piece.where for piece in prose)
