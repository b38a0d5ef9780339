"""Pictures of pipeline schedules, simulated or recorded: which rank runs which micro-batch when, and when it is idle.

A run on a pipeline records what its ranks did in one step (train/pipeline_record.py); the record is drawn in the same
way, with the measured idle share beside the formula's.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tightfit.bounded_files import LARGEST_RECORD_BYTES, read_json
from tightfit.errors import UserError
from tightfit.jobs.layout import PipelineSchedule
from tightfit.plan.seconds.pipeline import bubble_share
from tightfit.report.figure import panels
from tightfit.report.pipeline_schedule import (
    UNFLUSHED,
    Task,
    TimedTask,
    Work,
    checked,
    idle_share,
    simulate_schedule,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

NARROWEST_NUMBER = 0.008
"""Share of the picture's width; a narrower task has no room for its number."""
COLORS: dict[Work, str] = {"forward": "#9db8d9", "backward": "#4c9f70", "input": "#4c9f70", "weights": "#e0a458"}
LEGEND: dict[Work, str] = {
    "forward": "forward",
    "backward": "backward, or its part that others wait for",
    "weights": "gradients of weights",
}


def draw_pipeline(
    schedules: list[PipelineSchedule], ranks: int, batches: int, path: Path, *, pieces: int = 2
) -> dict[str, float]:
    """Draw a panel per schedule; returns the idle share of each."""
    tasks = {schedule: simulate_schedule(schedule, ranks, batches, pieces) for schedule in schedules}
    if not tasks:
        raise UserError("no schedule to draw; give at least one --schedule")
    idle = {schedule: idle_share(own, ranks) for schedule, own in tasks.items()}
    height = (0.3 * ranks + 0.7) * len(tasks) + 1.0
    with panels(path, len(tasks), 1, width=11, height=height, sharex=True) as (figure, axes):
        for panel, (schedule, own) in zip(axes[:, 0], tasks.items(), strict=True):
            _draw_tasks(panel, own, ranks, numbered=max(timed.end for timed in own) <= 80)
            panel.set_title(f"{schedule}: ranks wait {idle[schedule]:.1%} of the time", fontsize=10)
        axes[-1, 0].set_xlabel("time, in forward passes of one micro-batch through one rank")
        figure.suptitle(f"{ranks} pipeline ranks, {batches} micro-batches; white is waiting")
        figure.legend(handles=_legend(), loc="outside lower center", ncols=len(LEGEND), frameon=False)
    return {str(schedule): share for schedule, share in idle.items()}


class Record(NamedTuple):
    """The recorded tasks of a pipeline's ranks in one step of a run, or in several."""

    schedule: PipelineSchedule
    ranks: int
    micro_batches: int
    pieces: int
    tasks: list[TimedTask]
    steps: int = 1

    @property
    def waited(self) -> float:
        """Measured idle share of the ranks' time, from the first start to the last end."""
        return idle_share(self.tasks, self.ranks)

    @property
    def formula(self) -> float:
        """The bubble of equal stages: (K−1)/(K−1+vM), M counting the micro-batches of all steps between two flushes."""
        steps = self.steps if self.schedule == UNFLUSHED else 1
        return bubble_share(self.ranks, steps * self.micro_batches, self.pieces)


def read_record(run: Path) -> Record:
    """The record of the run in directory `run`, or of the file `run`."""
    path = run / "pipeline.json" if run.is_dir() else run
    remedy = "train three steps or more with layout.pipeline above 1"
    data = read_json(path, LARGEST_RECORD_BYTES, "the record of a pipeline", remedy=remedy)
    try:
        return record_of(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is not the record of a pipeline ({error}); train three steps or more with layout.pipeline above 1"
        ) from None


def record_of(data: dict[str, Any]) -> Record:
    """A record from plain data."""
    tasks = [
        TimedTask(row["rank"], Task(row["work"], row["batch"], row["stage"]), row["start_s"], row["end_s"])
        for row in data["slots"]
    ]
    if not tasks:
        raise ValueError("it has no slots")
    counts = [data["ranks"], data["micro_batches"], data["pieces"], data.get("steps", 1)]
    numbers = [*counts, *(task.rank for task in tasks)]
    times = [time for task in tasks for time in (task.start, task.end)]
    if not all(type(each) is int and 0 <= each < 10**6 for each in numbers) or min(counts) < 1:
        raise ValueError("its ranks, micro-batches, pieces or steps are no counts")
    if not all(isinstance(time, int | float) and 0 <= time < 1e9 for time in times):
        raise ValueError("its times are no seconds")
    if any(task.end < task.start for task in tasks) or max(times) == min(times):
        raise ValueError("its slots end before they start, or nothing took any time")
    ranks, micro_batches, pieces, steps = counts
    return Record(checked([data["schedule"]])[0], ranks, micro_batches, pieces, tasks, steps)


def draw_record(record: Record, path: Path) -> None:
    """Draw one recorded step, in seconds."""
    draw_records([record], path)


def draw_records(records: Sequence[Record], path: Path) -> None:
    """Draw recorded steps of the same ranks and micro-batches, a panel each, in seconds."""
    ranks, batches, steps = records[0].ranks, records[0].micro_batches, records[0].steps
    told_steps = f"{steps} steps of " if steps > 1 else ""
    height = (0.3 * ranks + 0.7) * len(records) + 1.0
    with panels(path, len(records), 1, width=11, height=height, sharex=True) as (figure, axes):
        for panel, record in zip(axes[:, 0], records, strict=True):
            _draw_tasks(panel, record.tasks, ranks, numbered=len(record.tasks) <= 80 * ranks)
            told = f"ranks waited {record.waited:.1%} of the time; the formula says {record.formula:.1%}"
            panel.set_title(f"{record.schedule}: {told}", fontsize=10)
        axes[-1, 0].set_xlabel("seconds")
        figure.suptitle(
            f"{ranks} pipeline ranks, {told_steps}{batches} micro-batches (the numbers), as recorded\n"
            "formula: (K−1)/(K−1+vM) of K ranks, M micro-batches between flushes, v stages a rank"
        )
        figure.legend(handles=_legend(), loc="outside lower center", ncols=len(LEGEND), frameon=False)


def _legend() -> list["Patch"]:
    from matplotlib.patches import Patch

    return [Patch(color=COLORS[work], label=text) for work, text in LEGEND.items()]


def _draw_tasks(axes: "Axes", tasks: list[TimedTask], ranks: int, *, numbered: bool) -> None:
    longest = max(timed.end for timed in tasks)
    for timed in tasks:
        length = timed.end - timed.start
        darker = 0.65 if timed.task.stage >= ranks else 1.0  # the second stage of a rank
        axes.barh(
            timed.rank,
            length,
            left=timed.start,
            height=0.86,
            color=COLORS[timed.task.work],
            alpha=darker,
            edgecolor="white",
            linewidth=0.6,
        )
        if numbered and length >= NARROWEST_NUMBER * longest:
            axes.text(
                timed.start + length / 2, timed.rank, str(timed.task.batch + 1), ha="center", va="center", fontsize=6
            )
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
