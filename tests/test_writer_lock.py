"""Locks beside outputs: they never cost anybody a file."""

import json
import os
from pathlib import Path

import pytest

from tightfit.errors import UserError
from tightfit.writer_lock import LOCK_FILE, locked, locked_beside, refuse_if_locked


def test_a_lock_that_a_kill_left_is_taken_and_goes(tmp_path: Path) -> None:
    for content in (b"", b"\0" * 40, json.dumps({"pid": 1, "host": "a", "since": "b"}).encode()):
        (tmp_path / ".lock-out").write_bytes(content)
        with locked_beside(tmp_path / "out"):
            assert json.loads((tmp_path / ".lock-out").read_text())["pid"] == os.getpid()
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["my notes", "[]", '{"pid": 1}'])
def test_a_file_of_somebody_is_left_alone(content: str, tmp_path: Path) -> None:
    """It was written over, and removed."""
    (tmp_path / LOCK_FILE).write_text(content)
    with pytest.raises(UserError, match=r"\.lock is there and is no lock of tightfit; remove it"), locked(tmp_path):
        pass
    assert (tmp_path / LOCK_FILE).read_text() == content


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    """What it led to was written over."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / ".lock-out").symlink_to(precious)
    with pytest.raises(UserError, match="no lock of tightfit"), locked_beside(tmp_path / "out"):
        pass
    assert precious.read_text() == "mine"


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOCK_FILE)
    refuse_if_locked(tmp_path)
    with pytest.raises(UserError, match="no lock of tightfit"), locked(tmp_path):
        pass
