"""Directories and files appear whole or not at all."""

import os
import time
from pathlib import Path

import pytest

from tightfit.durable import discard_directory, durable_directory, durable_file, sweep, sweep_abandoned


def test_directory_appears_on_a_clean_exit_only(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "target"
    with durable_directory(target) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("x")
        assert not target.exists()
    assert (target / "sub" / "file").read_text() == "x"

    def fail() -> None:
        with durable_directory(tmp_path / "other") as folder:
            (folder / "file").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


def test_file_replaces_or_leaves_alone(tmp_path: Path) -> None:
    target = tmp_path / "file"
    for text in ("one", "two"):
        with durable_file(target) as path:
            path.write_text(text)
    assert target.read_text() == "two"

    def fail() -> None:
        with durable_file(target) as path:
            path.write_text("three")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert target.read_text() == "two"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_link_stays_and_the_file_it_names_is_written(tmp_path: Path) -> None:
    """Also where that is not there yet, and over two links."""
    link, second, file = tmp_path / "link", tmp_path / "second", tmp_path / "elsewhere" / "file"
    link.symlink_to(second)
    second.symlink_to("elsewhere/file")
    for text in ("one", "two"):
        with durable_file(link) as path:
            path.write_text(text)
        assert (file.read_text(), link.is_symlink(), second.is_symlink()) == (text, True, True)
    assert [path.name for path in file.parent.iterdir()] == ["file"]
    assert {path.name for path in tmp_path.iterdir()} == {"link", "second", "elsewhere"}


def test_an_existing_directory_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "precious").write_text("x")

    with pytest.raises(OSError, match="target"), durable_directory(tmp_path / "target") as folder:
        (folder / "file").write_text("y")
    assert (tmp_path / "target" / "precious").read_text() == "x"


def test_discard_and_sweep(tmp_path: Path) -> None:
    for name in ("keep", "drop", ".partial-a-1", ".discarded-b-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / ".partial-file").write_text("x")
    discard_directory(tmp_path / "drop")
    sweep(tmp_path)
    sweep(tmp_path / "absent")
    assert [path.name for path in tmp_path.iterdir()] == ["keep"]


def test_what_a_kill_left_goes_with_the_next_write_of_the_same_target(tmp_path: Path) -> None:
    """But not what somebody still writes, nor what is too young to tell, nor another target's."""

    def leave(name: str, age_s: float) -> Path:
        path = tmp_path / name
        path.mkdir()
        os.utime(path, (time.time() - age_s,) * 2)
        return path

    gone = [leave(".partial-model-11111111", 90), leave(".discarded-model-22222222", 90)]
    stay = [leave(".partial-model-33333333", 5), leave(".partial-other-44444444", 90)]
    with durable_directory(tmp_path / "model") as ours:
        os.utime(ours, (time.time() - 90,) * 2)
        sweep_abandoned(tmp_path / "model")
        assert ours.exists(), "it is being written"
        (ours / "file").write_text("x")
    assert not any(path.exists() for path in gone)
    assert all(path.exists() for path in stay)
    assert (tmp_path / "model" / "file").read_text() == "x"
