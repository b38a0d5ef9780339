"""An empty matplotlib figure in our style, saved as PNG or SVG by its suffix."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.durable import durable_file, place_of, refuse_unwritable
from tightfit.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")
GIB = 2**30
SOFTWARE = "drawn by tightfit"
"""Written into the picture's metadata, by which our own pictures are recognised."""
CARD_COLOR = "#d1495b"


def check_picture_path(path: Path) -> None:
    """Refuse a path that no picture can be written to, before anything is drawn."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"picture {path} ends in {path.suffix or 'nothing'!r}; name it .png or .svg")
    if path.is_dir():
        raise UserError(f"picture {path} is a directory; name a file in it")
    refuse_unwritable(place_of(path).parent, path)


@contextmanager
def panels(
    path: Path, rows: int, columns: int, *, width: float, height: float, sharex: bool = False, sharey: bool = False
) -> Iterator[tuple["Figure", Any]]:
    """A grid of axes to draw on, written to `path` on a clean exit."""
    check_picture_path(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": "tightfit", "svg.fonttype": "none", "font.size": 9}):
        figure, axes = pyplot.subplots(
            rows, columns, figsize=(width, height), squeeze=False, constrained_layout=True, sharex=sharex, sharey=sharey
        )
        try:
            yield figure, axes
            _write(figure, path)
        finally:
            pyplot.close(figure)


def _write(figure: "Figure", path: Path) -> None:
    form = path.suffix.lower()[1:]
    metadata: dict[str, Any] = {"Date": None, "Creator": SOFTWARE}
    if form == "png":
        metadata = {"Software": SOFTWARE, "Description": "\n".join(words(figure))}
    try:
        with durable_file(path) as file:
            figure.savefig(file, format=form, dpi=130, metadata=metadata)
    except OSError as error:
        raise UserError(f"cannot write picture {path}: {error.strerror}; choose a writable place") from None


def words(figure: "Figure") -> list[str]:
    """All visible text of a figure, for its description (alternative text)."""
    from matplotlib.text import Text

    found: list[Text] = figure.findobj(Text)
    return [text for each in found if each.get_visible() and (text := each.get_text().strip())]


def plain(axes: "Axes") -> None:
    """No frame on top and right, a faint grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
