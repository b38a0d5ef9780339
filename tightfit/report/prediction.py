"""A run compared with its plan: peak memory and speed, predicted and measured."""

from dataclasses import dataclass
from typing import Any

from rich.table import Table

from tightfit.jobs.job import Job
from tightfit.plan.job import overridden
from tightfit.plan.plan import Plan
from tightfit.report.console import output_console
from tightfit.report.escaping import escape
from tightfit.report.tables import count_name, first_steps, gib
from tightfit.train.loop import RunResult


@dataclass(frozen=True)
class Prediction:
    """Predicted and measured figures of a run, with notes where the two are not comparable."""

    machine: str
    device: str
    predicted_bytes: int
    measured_bytes: int
    predicted_tokens_per_second: float
    measured_tokens_per_second: float
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "machine": self.machine,
            "peak_allocated_bytes": self.predicted_bytes,
            "tokens_per_second": self.predicted_tokens_per_second,
            "peak_error": _error(self.predicted_bytes, self.measured_bytes),
            "speed_error": _error(self.predicted_tokens_per_second, self.measured_tokens_per_second),
            "notes": list(self.notes),
        }


def prediction(plan: Plan, job: Job, result: RunResult) -> Prediction:
    """The plan's figures and the run's. On a GPU both are allocated bytes."""
    return Prediction(
        machine=plan.machine.text,
        device=result.device,
        predicted_bytes=plan.ledger.peak_allocated_bytes(),
        measured_bytes=result.peak_bytes,
        predicted_tokens_per_second=plan.tokens_per_second,
        measured_tokens_per_second=result.tokens_per_second,
        notes=tuple(_notes(plan, job, result)),
    )


def _notes(plan: Plan, job: Job, result: RunResult) -> list[str]:
    planned = plan.workload.spec.params()
    said = [
        f"the run did not follow the plan: {changed}" if (changed := overridden(plan, job)) else None,
        f"the model has {result.params:,} parameters, the plan counted with {planned:,}"
        if result.params != planned
        else None,
        "on a CPU the measured memory is the whole process's, which no plan predicts"
        if result.device.startswith("CPU")
        else None,
        f"{first_steps(result.warmup_steps)} took {result.warmup_seconds:.1f} s to warm up, which is not in this speed"
        if result.warmup_steps
        else None,
    ]
    return [note for note in said if note]


def print_prediction(found: Prediction) -> None:
    """A table of two lines, and the notes."""
    console = output_console()
    table = Table(title="The plan beside the run", title_justify="left", box=None, padding=(0, 1))
    for column in ("", f"predicted, {found.machine}", f"measured, {found.device}", "error"):
        table.add_column(escape(column), justify="right" if column else "left")
    memory = found.predicted_bytes, found.measured_bytes
    speed = found.predicted_tokens_per_second, found.measured_tokens_per_second
    table.add_row("peak memory", *map(gib, memory), _shown(*memory))
    table.add_row("tokens/s", *map(count_name, speed), _shown(*speed))
    console.print(table)
    for note in found.notes:
        console.print(f"[dim]· {escape(note)}[/dim]", soft_wrap=True)


def _error(predicted: float, measured: float) -> float | None:
    return predicted / measured - 1 if measured else None


def _shown(predicted: float, measured: float) -> str:
    error = _error(predicted, measured)
    if error is None:
        return "–"
    return f"{error:+.1%}" if error < 10 else f"{error + 1:,.0f} ×"
