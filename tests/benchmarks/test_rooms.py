"""The picture of the rooms is drawn from the package as it is."""

from pathlib import Path

from benchmarks.reports.rooms import draw_rooms, floors, line_counts
from tests.test_architecture import FLOORS, PACKAGE


def test_every_line_of_the_package_is_in_a_room() -> None:
    assert floors() == FLOORS
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert sum(line_counts().values()) == sum(lines.values()) - lines[PACKAGE / "__init__.py"]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    counts = draw_rooms(tmp_path / "rooms.svg")
    drawn = (tmp_path / "rooms.svg").read_text(encoding="utf-8")
    assert all(room.replace(".", "/") in drawn for room, lines in counts.items() if lines)
