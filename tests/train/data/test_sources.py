"""What names become: order, what is skipped, and what is refused."""

import importlib.util
import os
import sysconfig
from pathlib import Path

import pytest

from tightfit.errors import UserError
from tightfit.jobs.job import Job
from tightfit.jobs.paths import MARK, with_absolute_paths
from tightfit.train.data.sources import Source, find_sources


def write(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_files_keep_the_order_they_are_named_in(tmp_path: Path) -> None:
    second, first = write(tmp_path / "b.txt"), write(tmp_path / "a.JSONL")
    assert find_sources([str(second), str(first)]) == [Source(second, "text"), Source(first, "jsonl")]


def test_a_directory_is_searched_in_the_order_of_paths(tmp_path: Path) -> None:
    for name in ("z.md", "sub/deep/b.py", "sub/a.parquet", "a.txt"):
        write(tmp_path / name)
    for skipped in (".hidden.txt", ".git/x.txt", "picture.png", "no_suffix", "data.json"):
        write(tmp_path / skipped)
    write(tmp_path / "empty.py", "")
    (tmp_path / "loop").symlink_to(tmp_path)
    found = [source.path.relative_to(tmp_path).as_posix() for source in find_sources([str(tmp_path)])]
    assert found == ["a.txt", "sub/a.parquet", "sub/deep/b.py", "z.md"]


@pytest.mark.parametrize("marks", [["dataset_dict.json"], ["state.json", "dataset_info.json"]])
def test_a_saved_dataset_is_one_source(tmp_path: Path, marks: list[str]) -> None:
    for mark in [*marks, "train.txt"]:
        write(tmp_path / "data" / "saved" / mark)
    expected = [Source(tmp_path / "data" / "saved", "saved")]
    assert find_sources([str(tmp_path / "data" / "saved")]) == find_sources([str(tmp_path / "data")]) == expected


def test_stamps_change_with_the_file(tmp_path: Path) -> None:
    source = Source(write(tmp_path / "a.txt"), "text")
    before = list(source.stamps())
    assert before[0][:2] == (str((tmp_path / "a.txt").resolve()), 1)
    write(tmp_path / "a.txt", "xy")
    assert list(source.stamps()) != before


def test_a_name_that_is_no_utf_8_is_data_too(tmp_path: Path) -> None:
    """Linux has such names; what is remembered of them must be text that JSON can hold."""
    for name in (b"\xfe.txt", b"\xff.txt"):
        write(tmp_path / os.fsdecode(name))
    stamps = [source.stamps() for source in find_sources([str(tmp_path)])]
    (first, *_), (second, *_) = (next(stamp) for stamp in stamps)
    assert first.encode() != second.encode()


def test_an_empty_name_is_not_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `--data "$UNSET"` gives: it trained on whatever lay about."""
    write(tmp_path / "notes.txt")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"data is an empty name; write it out, or \. for the working directory"):
        find_sources([""])
    shape = {"model": "smollm2-135m", "output": "runs/x", "steps": 1}
    job = with_absolute_paths(Job.model_validate(shape | {"data": {"train": [""]}}))
    assert job.data.train == [""]  # refused where it is opened
    assert [source.path.name for source in find_sources(["."])] == ["notes.txt"]


def test_stdlib_has_prose_and_sources_without_tests_or_packages() -> None:
    sources = find_sources(["stdlib"])
    assert sources == find_sources(["stdlib"])
    assert sources[0].kind == "topics"
    names = [source.path.as_posix() for source in sources[1:]]
    assert names == sorted(names)
    assert len(names) > 300
    assert any(name.endswith("/json/decoder.py") for name in names)
    root = Path(sysconfig.get_paths()["stdlib"])
    folders = {part for name in names for part in Path(name).relative_to(root).parts[:-1]}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def test_patterns_stand_for_files_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [write(tmp_path / name) for name in ("a/1.jsonl", "a/b/2.jsonl", "c.jsonl", "d[1].txt")]
    write(tmp_path / "a" / "no.txt")
    assert [source.path for source in find_sources([f"{tmp_path}/**/*.jsonl"])] == found[:3]
    assert find_sources([str(found[3])]) == [Source(found[3], "text")], "a file of that very name is no pattern"
    monkeypatch.chdir(tmp_path)
    job = Job.model_validate({"model": "tiny-llama", "data": "a/*.jsonl", "output": "run", "steps": 1})
    assert with_absolute_paths(job).data.train == [f"{tmp_path}/a/*.jsonl"]
    beside = with_absolute_paths(job.model_copy(), tmp_path)
    monkeypatch.chdir("/")
    assert with_absolute_paths(job, tmp_path).data.train == beside.data.train == [f"{tmp_path}/a/*.jsonl"]


def test_a_directory_is_not_searched_for_settings_and_tables(tmp_path: Path) -> None:
    text, packed = write(tmp_path / "a.txt"), write(tmp_path / "b.jsonl.zst")
    for name in ("package.json", "numbers.csv", "old.parquet.gz"):
        write(tmp_path / name)
    assert find_sources([str(tmp_path)]) == [Source(text, "text"), Source(packed, "jsonl")]
    assert find_sources([str(tmp_path / "numbers.csv")])[0].kind == "csv"
    with pytest.raises(UserError, match="unsupported suffix"):
        find_sources([str(tmp_path / "old.parquet.gz")])


def test_a_run_inside_its_own_data_is_not_data(tmp_path: Path) -> None:
    """Else its metrics would be rows of what it trains on when it is resumed."""
    notes = write(tmp_path / "notes.txt")
    write(tmp_path / "runs" / "a" / "job.yaml", f"{MARK}output: runs/a\n")
    write(tmp_path / "runs" / "a" / "metrics.jsonl")
    rows = write(tmp_path / "runs" / "rows.jsonl")
    os.mkfifo(tmp_path / "runs" / "job.yaml")
    assert [source.path for source in find_sources([str(tmp_path)])] == [notes, rows]


def test_chats_take_only_rows(tmp_path: Path) -> None:
    rows, _ = write(tmp_path / "a.jsonl"), write(tmp_path / "readme.md")
    assert find_sources([str(tmp_path)], rows_only=True) == [Source(rows, "jsonl")]
    for name in (str(tmp_path / "readme.md"), "stdlib"):
        with pytest.raises(UserError, match=r"plain text, but chats are rows with roles; give \.jsonl, \.parquet"):
            find_sources([name], rows_only=True)


def test_what_cannot_be_data_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "empty.txt", "")
    write(tmp_path / "nothing" / "picture.png")
    write(tmp_path / "table.xls")
    cases = {
        "missing.txt": r"missing\.txt does not exist; name a file",
        "empty.txt": r"empty\.txt is empty",
        "nothing": r"nothing is a directory without usable files; supported are \.jsonl",
        "*.nothing": r"no file matches '.*\*\.nothing'; check the pattern",
        "table.xls": r"table\.xls has the unsupported suffix '\.xls'; supported are \.jsonl, \.parquet, .*\.txt",
    }
    for name, message in cases.items():
        with pytest.raises(UserError, match=message):
            find_sources([str(tmp_path / name)])
    with pytest.raises(UserError, match="no data is named"):
        find_sources([])


def test_stdlib_without_its_prose_or_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(UserError, match=r"'stdlib' needs pydoc_data of Python, which .* lacks"):
            find_sources(["stdlib"])
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(UserError, match=r"'stdlib' needs the sources \(\.py\) of Python"):
        find_sources(["stdlib"])
