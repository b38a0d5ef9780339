"""Rows from JSON Lines, Parquet and saved datasets: what comes out, and every way they can be wrong."""

import importlib
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tightfit.errors import UserError
from tightfit.train.data.rows import read_rows
from tightfit.train.data.sources import Source, find_sources


def rows_of(path: Path, wanted: list[str]) -> list[tuple[dict[str, object], str]]:
    (source,) = find_sources([str(path)])
    return [(dict(row.fields), row.where) for row in read_rows(source, wanted)]


def lines(path: Path, *content: bytes) -> Path:
    path.write_bytes(b"\n".join(content))
    return path


def test_json_lines_skip_blank_ones_and_keep_their_numbers(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "a"}', b"", b"  ", b'{"text": "b", "n": 1}', b"")
    assert rows_of(path, ["text"]) == [({"text": "a"}, f"{path} line 1"), ({"text": "b", "n": 1}, f"{path} line 4")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": }\n', r"a\.jsonl line 2 is not valid JSON \(Expecting value at column 10\)"),
        (b'{"text": "a"}\n[1]\n', r"line 2 holds a JSON list; each line must be an object"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', r"a\.jsonl is not valid UTF-8 at byte 24;"),
        (b'{"text": ' + b"[" * 100_000, r"line 1 is nested too deeply"),
        (b"\n\n", r"a\.jsonl has no rows"),
    ],
)
def test_bad_json_lines_say_where(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        rows_of(path, ["text"])


def test_an_unreadable_file_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lines(tmp_path / "a.jsonl", b"{}")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"a\.jsonl cannot be read \(Permission denied\); check"):
        list(read_rows(Source(path, "jsonl"), ["text"]))


def test_parquet_reads_the_wanted_columns_over_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [str(i) for i in range(2500)], "n": range(2500)}), path, row_group_size=700)
    found = rows_of(path, ["text", "absent"])
    assert [fields for fields, _ in found] == [{"text": str(i)} for i in range(2500)]
    assert found[-1][1] == f"{path} row 2500"
    (source,) = find_sources([str(path)])
    assert sum(row.source_bytes for row in read_rows(source, ["text"])) == pytest.approx(path.stat().st_size)


def test_bad_parquet_says_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": ["x"], "b": ["y"]}), path)
    with pytest.raises(UserError, match=r"a\.parquet has no field 'text' \(it has 'a', 'b'\); name the field"):
        rows_of(path, ["text"])
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"PAR1 nonsense"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"a\.parquet cannot be read as Parquet \(.*\); write or fetch it again"):
            rows_of(path, ["a"])
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    with pytest.raises(UserError, match=r"a\.parquet has no rows"):
        rows_of(path, ["text"])


def test_parquet_with_invalid_utf8_is_refused(tmp_path: Path) -> None:
    buffers = [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    pq.write_table(pa.table({"text": pa.Array.from_buffers(pa.string(), 1, buffers)}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet cannot be read as Parquet \('utf-8' codec"):
        rows_of(tmp_path / "a.parquet", ["text"])


def test_saved_datasets_use_their_train_split(tmp_path: Path) -> None:
    datasets = importlib.import_module("datasets")  # seconds, of the worker that runs this alone
    datasets.disable_progress_bars()
    one = datasets.Dataset.from_dict({"text": ["a", "b"], "turns": [[{"role": "u"}], []], "other": [1, 2]})
    two = datasets.Dataset.from_dict({"text": ["c"]})
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=one, test=two).save_to_disk(tmp_path / "splits")
    datasets.DatasetDict(test=two).save_to_disk(tmp_path / "no_train")
    two.select([]).save_to_disk(tmp_path / "empty")
    expected = [{"text": "a", "turns": [{"role": "u"}]}, {"text": "b", "turns": []}]
    for name in ("one", "splits"):
        found = rows_of(tmp_path / name, ["text", "turns"])
        assert [fields for fields, _ in found] == expected
        assert found[1][1] == f"{tmp_path / name} row 2"
    for name, message in {"no_train": r"has the splits 'test' and no 'train'", "empty": "empty has no rows"}.items():
        with pytest.raises(UserError, match=message):
            rows_of(tmp_path / name, ["text"])
    with pytest.raises(UserError, match=r"one has no field 'body' \(it has 'text', 'turns', 'other'\)"):
        rows_of(tmp_path / "one", ["body"])
    for arrow in (tmp_path / "one").glob("*.arrow"):
        arrow.write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"one cannot be read as a saved dataset \(.*\); save it again"):
        rows_of(tmp_path / "one", ["text"])


def test_missing_packages_are_named_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for kind, command in {"saved": "pip install datasets", "parquet": "pip install pyarrow"}.items():
        with pytest.raises(UserError, match=command):
            list(read_rows(Source(tmp_path, kind), ["text"]))  # type: ignore[arg-type]
