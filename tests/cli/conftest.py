"""Commands as a user types them, in this process."""

import json
from typing import Any

import pytest

from tests.few_dots import few_dots
from tightfit.cli import main as cli

__all__ = ["few_dots"]


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
