"""The live line of a run: a rich progress bar on a terminal, an occasional plain line elsewhere, nothing when quiet."""

import sys
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tightfit.printable import printable

PLAIN_LINE_SECONDS = 10.0
T = TypeVar("T")


class RunProgress:
    """Shows loss, tokens/s, memory and time left after every step."""

    def __init__(self, total_steps: int, first_step: int, quiet: bool) -> None:
        self.console = Console(file=sys.stderr, quiet=quiet)
        self.total_steps, self._shown_at = total_steps, 0.0
        self._live = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=quiet or not self.console.is_terminal,
        )
        self._task = self._live.add_task("", total=total_steps, completed=first_step, numbers="")
        self._started, self._first = time.monotonic(), first_step

    def say(self, message: str) -> None:
        """Print a line above the live one."""
        self._live.console.print(printable(message), highlight=False, markup=False, soft_wrap=True)

    def update(self, step: int, loss: float, tokens_per_second: float, memory_bytes: int) -> None:
        """Show the numbers of step `step`."""
        numbers = f"loss {loss:.3f}  {tokens_per_second:,.0f} tok/s  {memory_bytes / 2**30:.2f} GiB"
        self._live.update(self._task, completed=step, numbers=numbers)
        now = time.monotonic()
        if self.console.is_terminal or (now - self._shown_at < PLAIN_LINE_SECONDS and step < self.total_steps):
            return
        self._shown_at = now
        left = (now - self._started) / max(step - self._first, 1) * (self.total_steps - step)
        self.say(f"step {step}/{self.total_steps}  {numbers}  {left:.0f} s left")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()


def followed(items: Iterable[T], count: int, *, what: str, shown: bool) -> Iterator[T]:
    """Yield all `count` items; on a terminal a bar shows `what`, the items done and the time left."""
    console = Console(stderr=True)
    with Progress(
        TextColumn(what),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not (shown and console.is_terminal),
    ) as bar:
        yield from bar.track(items, total=count)
