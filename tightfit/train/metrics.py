"""metrics.jsonl: one row per logged step, always; TensorBoard events when asked.

A resumed run continues the file: rows past the checkpoint it resumes from are dropped first, so every step stands once.
"""

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tightfit.bounded_files import read_bounded
from tightfit.durable import durable_file
from tightfit.errors import UserError

LARGEST_BYTES = 2**30
LONGEST_ROW_BYTES = 10_000


class MetricsLog:
    """Appends rows to `run/metrics.jsonl`, each flushed as it is written."""

    def __init__(self, run: Path, resumed_step: int, tensorboard: bool) -> None:
        self.path = run / "metrics.jsonl"
        kept = [row for row in read_metrics(self.path) if row["step"] <= resumed_step] if resumed_step else []
        with durable_file(self.path) as fresh:
            fresh.write_text("".join(_line(row) for row in kept), encoding="utf-8")
        self._file = self.path.open("a", encoding="utf-8")
        self._writer = _tensorboard_writer(run / "tensorboard", resumed_step) if tensorboard else None

    def add(self, step: int, **values: Any) -> None:
        """One row."""
        self._file.write(_line({"step": step, **values}))
        self._file.flush()
        if self._writer is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._writer.add_scalar(name, value, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; lines that are none (cut short by a kill, or damaged) are passed over."""
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


def _tensorboard_writer(folder: Path, resumed_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            "logging.tensorboard is true, but it is not installed: pip install 'tightfit[tensorboard]'"
        ) from None
    return SummaryWriter(str(folder), purge_step=resumed_step + 1)
