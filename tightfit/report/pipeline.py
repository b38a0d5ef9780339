"""Pipeline schedules as pictures: who works on which micro-batch when, and who waits.

Every rank has its work in a fixed order (GPipe, Huang et al. 2019; 1F1B and interleaved, Narayanan et al. 2021) and
does the next piece as soon as what it needs is there; forward takes 1, backward 2. Zero-bubble (ZB-H1, Qi et al. 2023)
splits backward into the gradient of the input, which others wait for, and of the weights, which nobody does: a rank
goes on as under 1F1B where it can and fills its waiting with weights, holding at most as many micro-batches as there
are ranks.

A run on a pipeline records what its ranks did in one step (train/pipeline_record.py); that is drawn the same way, with
the share of time that ranks waited beside what the formula says.
"""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tightfit.bounded_files import LARGEST_RECORD_BYTES, read_json
from tightfit.errors import UserError
from tightfit.jobs.layout import PipelineSchedule
from tightfit.plan.bubble import bubble_share
from tightfit.report.figure import panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

Work = Literal["forward", "backward", "input", "weights"]
DURATIONS: dict[Work, int] = {"forward": 1, "backward": 2, "input": 1, "weights": 1}
COLORS: dict[Work, str] = {"forward": "#9db8d9", "backward": "#4c9f70", "input": "#4c9f70", "weights": "#e0a458"}
LEGEND: dict[Work, str] = {
    "forward": "forward", "backward": "backward, or its part that others wait for", "weights": "gradients of weights",
}  # fmt: skip
SCHEDULES: tuple[PipelineSchedule, ...] = ("gpipe", "1f1b", "interleaved", "zero-bubble")
LARGEST = 64


def checked(names: Sequence[str]) -> list[PipelineSchedule]:
    """The schedules of these names; another name is an error."""
    found = [schedule for name in names for schedule in SCHEDULES if schedule == name]
    if unknown := [name for name in names if name not in SCHEDULES]:
        raise UserError(f"there is no schedule {unknown[0]!r}; give one of {', '.join(SCHEDULES)}")
    return found


class Piece(NamedTuple):
    """One piece of work: micro-batch `batch` through stage `stage` of the model."""

    work: Work
    batch: int
    stage: int


class Slot(NamedTuple):
    """A piece of work on `rank`, from `start` to `end`."""

    rank: int
    piece: Piece
    start: float
    end: float


def slots(schedule: PipelineSchedule, ranks: int, batches: int, pieces: int = 2) -> list[Slot]:
    """A whole step; `pieces` is how many stages a rank has under the interleaved schedule."""
    if not (1 <= ranks <= LARGEST and 1 <= batches <= LARGEST):
        raise UserError(f"a picture of {ranks} ranks and {batches} micro-batches; give 1 to {LARGEST} of each")
    if schedule == "zero-bubble":
        return list(_zero_bubble(ranks, batches))
    stages = pieces if schedule == "interleaved" else 1
    if schedule == "interleaved" and batches % ranks:
        raise UserError(f"{batches} micro-batches are not a multiple of {ranks} ranks, as interleaving needs")
    orders = [list(_order(schedule, rank, ranks, batches, stages)) for rank in range(ranks)]
    made = _played(orders, ranks, ranks * stages)
    return [slot._replace(start=slot.start / stages, end=slot.end / stages) for slot in made]


def idle_share(made: list[Slot], ranks: int) -> float:
    """Share of the ranks' time, from the first start to the last end, in which they wait."""
    total = ranks * max(slot.end for slot in made)
    return 1 - sum(slot.end - slot.start for slot in made) / total


def _order(schedule: PipelineSchedule, rank: int, ranks: int, batches: int, stages: int) -> Iterator[Piece]:
    """Warm-up forwards, then one forward and one backward in turn, then the backwards that are left."""
    steps = batches * stages
    warm = {"gpipe": steps, "1f1b": ranks - rank - 1}.get(schedule, 2 * (ranks - rank - 1) + (stages - 1) * ranks)
    warm = min(warm, steps)
    forwards = [_piece("forward", step, rank, ranks, stages) for step in range(steps)]
    backwards = [_piece("backward", step, rank, ranks, stages) for step in range(steps)]
    yield from forwards[:warm]
    for forward, backward in zip(forwards[warm:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[steps - warm :]


def _piece(work: Work, step: int, rank: int, ranks: int, stages: int) -> Piece:
    """The `step`-th forward or backward of a rank: its stages take turns, `ranks` micro-batches each."""
    turn = step // ranks % stages
    stage = turn if work == "forward" else stages - 1 - turn
    batch = step if stages == 1 else step // (ranks * stages) * ranks + step % ranks
    return Piece(work, batch, stage * ranks + rank)


def _played(orders: list[list[Piece]], ranks: int, stages: int) -> Iterator[Slot]:
    """Each rank does its next piece as soon as what it needs has ended."""
    ended: dict[Piece, int] = {}
    at, free = [0] * ranks, [0] * ranks
    while any(at[rank] < len(orders[rank]) for rank in range(ranks)):
        for rank in range(ranks):
            while at[rank] < len(orders[rank]):
                piece = orders[rank][at[rank]]
                ready = _ready(piece, ended, stages)
                if ready is None:
                    break
                start = max(ready, free[rank])
                free[rank] = ended[piece] = start + DURATIONS[piece.work]
                at[rank] += 1
                yield Slot(rank, piece, start, free[rank])


def _ready(piece: Piece, ended: dict[Piece, int], stages: int) -> int | None:
    """When all that `piece` needs has ended; None while it has not."""
    needed = [ended.get(need) for need in _needs(piece, stages)]
    return None if None in needed else max((end for end in needed if end is not None), default=0)


def _needs(piece: Piece, stages: int) -> Iterator[Piece]:
    if piece.work == "weights":
        yield piece._replace(work="input")
    elif piece.work == "forward":
        if piece.stage:
            yield piece._replace(stage=piece.stage - 1)
    else:
        yield piece._replace(work="forward")
        if piece.stage < stages - 1:
            yield piece._replace(stage=piece.stage + 1)


def _zero_bubble(ranks: int, batches: int) -> Iterator[Slot]:
    """Unit by unit, every rank what it should do next."""
    ended: dict[Piece, int] = {}
    done = [{"forward": 0, "input": 0, "weights": 0} for _ in range(ranks)]
    now = 0
    while any(counts["weights"] < batches for counts in done):
        chosen = [
            (rank, piece) for rank in range(ranks) if (piece := _next(rank, done[rank], ended, now, ranks, batches))
        ]
        for rank, piece in chosen:
            done[rank][piece.work] += 1
            ended[piece] = now + 1
            yield Slot(rank, piece, now, now + 1)
        now += 1


def _next(
    rank: int, counts: dict[str, int], ended: dict[Piece, int], now: int, ranks: int, batches: int
) -> Piece | None:
    """What a rank does at `now`; None where it waits."""
    works: tuple[Work, ...] = ("forward", "input", "weights")
    for work in works:
        if counts[work] == batches or (work == "forward" and _is_full(rank, counts, ranks)):
            continue
        piece = Piece(work, counts[work], rank)
        ready = _ready(piece, ended, ranks)
        if ready is not None and ready <= now:
            return piece
    return None


def _is_full(rank: int, counts: dict[str, int], ranks: int) -> bool:
    """Whether another forward would be more than 1F1B has under way here, or than the first rank holds."""
    under_way, held = counts["forward"] - counts["input"], counts["forward"] - counts["weights"]
    return under_way >= ranks - rank or held >= ranks


def draw_pipeline(
    schedules: list[PipelineSchedule], ranks: int, batches: int, path: Path, *, pieces: int = 2
) -> dict[str, float]:
    """A panel per schedule; returns the share of time that ranks wait."""
    made = {schedule: slots(schedule, ranks, batches, pieces) for schedule in schedules}
    if not made:
        raise UserError("no schedule to draw; give at least one --schedule")
    idle = {schedule: idle_share(those, ranks) for schedule, those in made.items()}
    height = (0.3 * ranks + 0.7) * len(made) + 1.0
    with panels(path, len(made), 1, width=11, height=height, sharex=True) as (figure, axes):
        for at, (schedule, those) in zip(axes[:, 0], made.items(), strict=True):
            _draw_slots(at, those, ranks, numbered=max(slot.end for slot in those) <= 80)
            at.set_title(f"{schedule}: ranks wait {idle[schedule]:.1%} of the time", fontsize=10)
        axes[-1, 0].set_xlabel("time, in forward passes of one micro-batch through one rank")
        figure.suptitle(f"{ranks} pipeline ranks, {batches} micro-batches; white is waiting")
        figure.legend(handles=_legend(), loc="outside lower center", ncols=len(LEGEND), frameon=False)
    return {str(schedule): share for schedule, share in idle.items()}


class Record(NamedTuple):
    """What the ranks of a pipeline did in one step of a run."""

    schedule: PipelineSchedule
    ranks: int
    micro_batches: int
    pieces: int
    slots: list[Slot]

    @property
    def waited(self) -> float:
        """Share of the ranks' time, from the first start to the last end, in which they did nothing."""
        return idle_share(self.slots, self.ranks)

    @property
    def formula(self) -> float:
        """The bubble of equal stages: (K−1)/(K−1+vM)."""
        return bubble_share(self.ranks, self.micro_batches, self.pieces)


def read_record(run: Path) -> Record:
    """The recorded step of the run in directory `run`."""
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
    slots = [
        Slot(row["rank"], Piece(row["work"], row["batch"], row["stage"]), row["start_s"], row["end_s"])
        for row in data["slots"]
    ]
    if not slots:
        raise ValueError("it has no slots")
    numbers = [data["ranks"], data["micro_batches"], data["pieces"], *(slot.rank for slot in slots)]
    times = [time for slot in slots for time in (slot.start, slot.end)]
    if not all(type(each) is int and 0 <= each < 10**6 for each in numbers) or min(numbers[:3]) < 1:
        raise ValueError("its ranks, micro-batches or pieces are no counts")
    if not all(isinstance(time, int | float) and 0 <= time < 1e9 for time in times):
        raise ValueError("its times are no seconds")
    return Record(checked([data["schedule"]])[0], data["ranks"], data["micro_batches"], data["pieces"], slots)


def draw_record(record: Record, path: Path) -> None:
    """One recorded step, in seconds."""
    draw_records([record], path)


def draw_records(records: Sequence[Record], path: Path) -> None:
    """Recorded steps of the same ranks and micro-batches, a panel each, in seconds."""
    ranks, batches = records[0].ranks, records[0].micro_batches
    height = (0.3 * ranks + 0.7) * len(records) + 1.0
    with panels(path, len(records), 1, width=11, height=height, sharex=True) as (figure, axes):
        for at, record in zip(axes[:, 0], records, strict=True):
            _draw_slots(at, record.slots, ranks, numbered=len(record.slots) <= 80 * ranks)
            told = f"ranks waited {record.waited:.1%} of the time; (K−1)/(K−1+vM) is {record.formula:.1%}"
            at.set_title(f"{record.schedule}: {told}", fontsize=10)
        axes[-1, 0].set_xlabel("seconds")
        figure.suptitle(f"{ranks} pipeline ranks, {batches} micro-batches, as recorded")
        figure.legend(handles=_legend(), loc="outside lower center", ncols=len(LEGEND), frameon=False)


def bubble_rows(path: Path) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """The newest recorded bubble of each schedule, from what benchmarks/pipeline_bubble.py wrote."""
    with path.open(encoding="utf-8", newline="") as file:
        newest = {row["schedule"]: row for row in csv.DictReader(file)}
    rows = [
        (f"`{name}`", row["ranks"], row["micro_batches"], row["pieces"], f"{float(row['waited']):.1%}",
         f"{float(row['formula']):.1%}")
        for name, row in newest.items()
    ]  # fmt: skip
    return ("schedule", "K", "M", "v", "ranks waited", "(K−1)/(K−1+vM)"), rows


def _legend() -> list["Patch"]:
    from matplotlib.patches import Patch

    return [Patch(color=COLORS[work], label=text) for work, text in LEGEND.items()]


def _draw_slots(axes: "Axes", made: list[Slot], ranks: int, *, numbered: bool) -> None:
    for slot in made:
        length = slot.end - slot.start
        darker = 0.65 if slot.piece.stage >= ranks else 1.0  # the second stage of a rank
        axes.barh(slot.rank, length, left=slot.start, height=0.86, color=COLORS[slot.piece.work], alpha=darker,
                  edgecolor="white", linewidth=0.6)  # fmt: skip
        if numbered:
            axes.text(
                slot.start + length / 2, slot.rank, str(slot.piece.batch + 1), ha="center", va="center", fontsize=6
            )
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
