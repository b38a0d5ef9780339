"""Commands as a user types them, in this process."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tightfit.cli import main as cli


class Run:
    """One invocation through the real entry point."""

    def __init__(self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
        monkeypatch.setattr("sys.argv", ["tightfit", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        self.code = stopped.value.code
        self.out, self.err = capfd.readouterr()

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def tightfit(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command: `tightfit("plan", …)`."""
    return lambda *arguments: Run(capfd, monkeypatch, *map(str, arguments))


@pytest.fixture(scope="package", autouse=True)
def _few_dots() -> Iterator[None]:
    """Pictures of commands have all that is in them, in few dots and not laid out: how they look is tests/report's."""
    from matplotlib.figure import Figure

    def save(figure: Figure, *given: Any, **named: Any) -> None:
        figure.set_layout_engine("none")
        whole(figure, *given, **{**named, "dpi": 20})

    whole = Figure.savefig
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Figure, "savefig", save)
        yield
