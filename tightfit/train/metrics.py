"""metrics.jsonl: one row per logged step, always; and the trackers (`trackers.py`) that the job names.

A resumed run continues the file: rows past the checkpoint it resumes from are dropped first, so every step stands once.
Metrics never fail a run: the first row that cannot be written (a full disk) is a warning, and later rows are tried.
"""

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tightfit.bounded_files import read_bounded
from tightfit.durable import durable_file
from tightfit.errors import UserError
from tightfit.printable import Say
from tightfit.train.trackers import Tracker, numbers

METRICS_FILE = "metrics.jsonl"
LARGEST_BYTES = 2**30
LONGEST_ROW_BYTES = 10_000


class SideFiles:
    """Files that a run can do without: the first one that cannot be written gets a warning, later ones none."""

    def __init__(self, say: Say) -> None:
        self.say, self.has_warned = say, False

    @contextmanager
    def guarded(self, path: Path) -> Iterator[None]:
        """Context for writing `path`: an OSError is a warning."""
        try:
            yield
        except OSError as error:
            if not self.has_warned:
                self.say(f"warning: cannot write {path}: {error.strerror or error}; the run goes on without")
            self.has_warned = True

    @contextmanager
    def tracked(self, tracker: Tracker) -> Iterator[None]:
        """Context for a call of `tracker`, whose errors of any type (a network, a full disk) are a warning."""
        try:
            yield
        except Exception as error:
            if not self.has_warned:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                self.say(f"warning: {type(tracker).__name__} takes no metrics ({reason:.200}); the run goes on without")
            self.has_warned = True


class MetricsLog:
    """Appends rows to `run/metrics.jsonl`, each written whole or not at all."""

    def __init__(self, run: Path, resumed_step: int, trackers: Sequence[Tracker], side_files: SideFiles) -> None:
        self.path, self._side_files = run / METRICS_FILE, side_files
        self._descriptor: int | None = None
        with side_files.guarded(self.path):
            _keep_rows(self.path, resumed_step)
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._trackers = trackers

    def add(self, step: int, **values: Any) -> None:
        """Append one row, and pass its numbers to the trackers."""
        with self._side_files.guarded(self.path):
            if self._descriptor is not None:
                _append(self._descriptor, _line({"step": step, **values}))
        for tracker in self._trackers:
            with self._side_files.tracked(tracker):
                tracker.add(step, numbers(values))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        for tracker in self._trackers:
            with self._side_files.tracked(tracker):
                tracker.close()


def _keep_rows(path: Path, resumed_step: int) -> None:
    """Rewrite the file with only its rows up to `resumed_step`."""
    kept = [row for row in read_metrics(path) if row["step"] <= resumed_step] if resumed_step else []
    with durable_file(path) as fresh:
        fresh.write_text("".join(map(_line, kept)), encoding="utf-8")


def _append(descriptor: int, text: str) -> None:
    """Append all of `text` to a file, or nothing."""
    before, data = os.fstat(descriptor).st_size, text.encode()
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, before)
        raise


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; lines that are no row (cut short by a kill, or damaged) are skipped."""
    try:
        content = read_bounded(path, LARGEST_BYTES, "a run's metrics") if path.exists() else b""
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; move it away") from None
    found = (_row(line) for line in content.split(b"\n") if line)
    return [row for row in found if row is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line) if len(line) < LONGEST_ROW_BYTES else None
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int and row["step"] >= 0 else None


def _line(row: dict[str, Any]) -> str:
    return json.dumps({name: _finite(value) for name, value in row.items()}) + "\n"


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
