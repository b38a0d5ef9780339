"""Pictures of commands have all that is in them, in few dots and not laid out: how they look is tests/report's."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module", autouse=True)
def few_dots() -> Iterator[None]:
    """For all tests of a module or folder that imports it."""
    with pytest.MonkeyPatch.context() as patched:
        draw_in_few_dots(patched)
        yield


def draw_in_few_dots(patched: pytest.MonkeyPatch) -> None:
    """From now on."""
    from matplotlib.figure import Figure

    def save(figure: Figure, *given: Any, **named: Any) -> None:
        figure.set_layout_engine(None)  # any other, "none" too, has all drawn once more
        whole(figure, *given, **{**named, "dpi": 20})

    whole = Figure.savefig
    patched.setattr(Figure, "savefig", save)
