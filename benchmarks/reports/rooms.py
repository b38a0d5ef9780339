"""A picture of the package: floors as rows from the ground up, rooms as boxes with their lines of code.

    python -m benchmarks.reports.rooms --out docs/pictures/rooms.png

The floors are those that tests/test_architecture.py enforces; they are read from its source, so there is one list. A
box's width is its share of the widest floor, but never less than its label.
"""

import argparse
import ast
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.report.figure import panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).parents[2]
LAST_TORCH_FREE = "exports"
"""The highest floor that does not import torch."""
COLORS = {True: "#cfe3d4", False: "#d6e2f0"}
LABELS = {True: "no torch: planning runs on a laptop", False: "may import torch"}
LETTER_WIDTH, PADDING, GAP = 0.0086, 0.02, 0.008


def floors() -> list[list[str]]:
    """FLOORS of tests/test_architecture.py, from the ground up."""
    tree = ast.parse((ROOT / "tests" / "test_architecture.py").read_text(encoding="utf-8"))
    (value,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "FLOORS" for target in node.targets)
    )
    found: list[list[str]] = ast.literal_eval(value)
    return found


def line_counts() -> dict[str, int]:
    """Lines of each room; a module belongs to the room with the longest name that it starts with."""
    rooms = sorted((room for floor in floors() for room in floor), key=len, reverse=True)
    counts = dict.fromkeys(rooms, 0)
    package = ROOT / "tightfit"
    for path in package.rglob("*.py"):
        module = ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__")
        room = next((room for room in rooms if f"{module}.".startswith(f"{room}.")), None)
        if room is not None:
            counts[room] += len(path.read_text(encoding="utf-8").splitlines())
    return counts


def draw_rooms(path: Path) -> dict[str, int]:
    """Draw the floors that have code; returns the lines of each room."""
    counts = line_counts()
    built = [[room for room in floor if counts[room]] for floor in floors()]
    rows = [floor for floor in built if floor]
    torch_free = next(index for index, floor in enumerate(rows) if LAST_TORCH_FREE in floor)
    with panels(path, 1, 1, width=11, height=0.42 * len(rows) + 1.1) as (figure, axes):
        at = axes[0][0]
        ends = [
            _draw_floor(at, index, floor, counts, torch_free=index <= torch_free) for index, floor in enumerate(rows)
        ]
        at.set(xlim=(0, max(1.0, *ends)), ylim=(-0.6, len(rows) - 0.4), xticks=[], yticks=[])
        at.set_ylabel("imports go down only")
        at.spines[["top", "right", "bottom", "left"]].set_visible(False)
        figure.suptitle(f"The rooms of tightfit, {sum(counts.values()):,} lines: floors from the ground up")
        figure.legend(handles=_legend(), loc="outside lower center", ncols=2, frameon=False)
    return counts


def _draw_floor(axes: "Axes", index: int, floor: list[str], counts: dict[str, int], *, torch_free: bool) -> float:
    """Draw its rooms side by side; returns where the last one ends."""
    from matplotlib.patches import Rectangle

    most = max(counts.values())
    left = 0.01
    for room in floor:
        label = f"{room.replace('.', '/')}  {counts[room]:,}"
        width = max(0.75 * counts[room] / most, LETTER_WIDTH * len(label) + PADDING)
        box = Rectangle((left, index - 0.36), width, 0.72, facecolor=COLORS[torch_free], edgecolor="#555555")
        axes.add_patch(box)
        axes.text(left + width / 2, index, label, ha="center", va="center", fontsize=8.5)
        left += width + GAP
    return left


def _legend() -> list[object]:
    from matplotlib.patches import Patch

    return [Patch(facecolor=COLORS[free], edgecolor="#555555", label=LABELS[free]) for free in (True, False)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    draw_rooms(parser.parse_args().out)
