"""Splits that a number of ranks allows: all of them, of the right size, and named on the page."""

from itertools import combinations
from pathlib import Path

import pytest

from tests.parallel.fake import fake_group
from tightfit.parallel.mesh import SUBMESHES, grid_of, make_mesh
from tightfit.prove.splits import AXES, splits_that_fit

PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_each_has_as_many_ranks_and_every_axis_is_there(ranks: int) -> None:
    found = splits_that_fit(ranks)
    assert len({split.name for split in found}) == len(found)
    assert all(split.layout.ranks == ranks for split in found)
    alone = {f"{axis} {ranks}" for axis in ("data", "ring", "heads", "expert", *(["tensor"] if ranks % 2 == 0 else []))}
    assert alone <= {split.name for split in found}


def test_four_ranks_hold_every_pair_and_eight_every_three() -> None:
    four, eight = ({split.name for split in splits_that_fit(ranks)} for ranks in (4, 8))
    assert {" × ".join(f"{axis} 2" for axis in pair) for pair in combinations(AXES, 2)} <= four
    assert {" × ".join(f"{axis} 2" for axis in three) for three in combinations(AXES, 3)} <= eight


def test_the_page_lists_what_is_tested_on_four_ranks() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    for split in splits_that_fit(4):
        assert f"`{split.name}`" in text, split.name


def test_splits_that_share_a_mesh_have_the_same_groups() -> None:
    """A diagnosis makes one mesh for each grid: tensor ranks in a line are no square, with as many ranks."""
    groups: dict[str, dict[str, list[int]]] = {}
    with fake_group(4):
        for split in splits_that_fit(4):
            mesh = make_mesh(split.layout, "cpu")
            own = {name: part.mesh.flatten().tolist() for name, part in vars(mesh)[SUBMESHES].items()}
            assert groups.setdefault(str(grid_of(split.layout)), own) == own, split.name
    assert len(groups) > 10
