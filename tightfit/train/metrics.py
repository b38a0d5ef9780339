"""metrics.jsonl: one row per logged step, always; TensorBoard events when asked.

A resumed run continues the file: rows past the checkpoint it resumes from are dropped first, so every step stands once.
"""

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tightfit.durable import durable_file
from tightfit.errors import UserError


class MetricsLog:
    """Appends rows to `run/metrics.jsonl`, each flushed as it is written."""

    def __init__(self, run: Path, resumed_step: int, tensorboard: bool) -> None:
        self.path = run / "metrics.jsonl"
        kept = [row for row in read_metrics(self.path) if row["step"] <= resumed_step] if resumed_step else []
        with durable_file(self.path) as fresh:
            fresh.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        self._file = self.path.open("a", encoding="utf-8")
        self._writer = _tensorboard_writer(run / "tensorboard", resumed_step) if tensorboard else None

    def add(self, step: int, **values: Any) -> None:
        """One row."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
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
    """The rows of a metrics file; a last line cut short by a kill is passed over."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [row for row in rows if isinstance(row, dict) and "step" in row]


def _tensorboard_writer(folder: Path, resumed_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            "logging.tensorboard is true, but it is not installed: pip install 'tightfit[tensorboard]'"
        ) from None
    return SummaryWriter(str(folder), purge_step=resumed_step + 1)
