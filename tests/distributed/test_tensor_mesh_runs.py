"""Runs on meshes of tensor ranks: any layout reads their checkpoints, and they any layout's, to the same bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.covering import thorough
from tests.distributed.group import Group
from tests.distributed.test_checkpoints import make, rewritten, run_on
from tightfit.jobs.job import Job

Make = Callable[[int], Group]
ROWS = {"micro_batch": 4}
SQUARE = {"tensor": 4, "tensor_mesh": "2d"} | ROWS
CUBE = {"tensor": 8, "tensor_mesh": "3d"} | ROWS
DEEP = {"tensor": 8, "tensor_mesh": "2.5d", "tensor_depth": 2} | ROWS
SHARDED_SQUARE = {"data": 2, "zero": 1, "tensor": 4, "tensor_mesh": "2d"} | ROWS
READERS = {"2d-zero-1": SHARDED_SQUARE, "2.5d": DEEP, "one": ROWS}
make = make  # the fixture of those tests


@pytest.mark.parametrize(("sharded", "readers"), [thorough(True, list(READERS)), thorough(False, ["2d-zero-1"])])
def test_what_a_cube_saves_is_read_by_every_layout(
    group: Make, make: Callable[..., Job], *, sharded: bool, readers: list[str]
) -> None:
    """Weights and moments, in pieces or whole; evaluation's last batch is shorter than the mesh."""
    fields: dict[str, Any] = {"steps": 1, "global_batch": 8}
    run_on(group, make("cube", CUBE, sharded=sharded, **fields))
    expected = rewritten(group, make("cube", CUBE, **fields), make("copy").output)
    for name in readers:
        found = rewritten(group, make("cube", READERS[name], **fields), make(f"copy by {name}").output)
        assert found == expected, name


@pytest.mark.parametrize("mesh", [SQUARE, thorough(CUBE)], ids=["square", "cube"])
def test_a_mesh_goes_on_from_pieces_of_another_layout(
    group: Make, make: Callable[..., Job], mesh: dict[str, Any], tmp_path: Path
) -> None:
    fields: dict[str, Any] = {"steps": 1, "global_batch": 8}
    run_on(group, make("pieces", {"data": 4, "zero": 3, "micro_batch": 2}, **fields))
    expected = rewritten(group, make("pieces", ROWS, **fields), make("copy").output)
    assert rewritten(group, make("pieces", mesh, **fields), make("copy by a mesh").output) == expected
