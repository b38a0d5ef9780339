"""Programs of their own, but forked from the server that has imported what they need."""

import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.distributed.group import PRELOADED
from tightfit.launch.forked import Forked


@contextmanager
def started(folder: Path, *arguments: str, function: Callable[..., None] | None = None) -> Iterator[Forked]:
    """`tightfit ARGUMENTS`, or a function of them, while it runs; what it writes is in `folder`, as files `stdout` and
    `stderr`."""
    with Forked(1, _run, (str(folder), function or run_main, arguments), PRELOADED) as program:
        yield program


def run_forked(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """`tightfit ARGUMENTS`: exit code, and all that was written to stdout and stderr, also by what is not Python."""
    return call_forked(folder, run_main, *arguments)


def call_forked(folder: Path, function: Callable[..., None], *arguments: Any) -> tuple[int, str, str]:
    """The same of a function that is called with `arguments`."""
    with Forked(1, _run, (str(folder), function, arguments), PRELOADED) as program:
        while program.wait():
            pass
        code = program.failures.get(0, 0)
    stdout, stderr = ((folder / name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
    return code, stdout, stderr


def _run(rank: int, folder: str, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    function(*arguments)


def run_main(*arguments: str) -> None:
    """`tightfit ARGUMENTS` in this process."""
    sys.argv = ["tightfit", *arguments]
    runpy.run_module("tightfit", run_name="__main__")
