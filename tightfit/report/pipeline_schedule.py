"""Simulated pipeline schedules: which rank runs which micro-batch when, and how long ranks are idle.

Every rank has its tasks in a fixed order (GPipe, Huang et al. 2019; 1F1B and interleaved, Narayanan et al. 2021) and
starts the next one as soon as its inputs are there; a forward takes 1, a backward 2. Zero-bubble (ZB-H1, Qi et al.
2023) splits backward into the gradient of the input, which other ranks wait for, and of the weights, which no rank
waits for: a rank follows 1F1B where it can and fills idle time with weight gradients, holding at most as many
micro-batches as there are ranks. ZB-V (Qi et al. 2024) has two stages a rank, in a V: the first rank has the first and
the last stage, so that the first micro-batch turns round at the last rank and all ranks fill up together. 2BW
(PipeDream-2BW, Narayanan et al. 2021) is 1F1B without a flush at the end of a step: here STEPS_IN_FLOW steps in a row.
"""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Literal, NamedTuple

from tightfit.errors import UserError
from tightfit.jobs.layout import PipelineSchedule

Work = Literal["forward", "backward", "input", "weights"]
DURATIONS: dict[Work, int] = {"forward": 1, "backward": 2, "input": 1, "weights": 1}
SCHEDULES: tuple[PipelineSchedule, ...] = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zb-v")
"""Schedules that are flushed after every step."""
UNFLUSHED: PipelineSchedule = "2bw"
STEPS_IN_FLOW = 3
LARGEST = 64


def checked(names: Sequence[str]) -> list[PipelineSchedule]:
    """The schedules of these names; an unknown name is an error."""
    known = (*SCHEDULES, UNFLUSHED)
    found = [schedule for name in names for schedule in known if schedule == name]
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"there is no schedule {unknown[0]!r}; give one of {', '.join(known)}")
    return found


class Task(NamedTuple):
    """One forward or backward of micro-batch `batch` through stage `stage`."""

    work: Work
    batch: int
    stage: int


class TimedTask(NamedTuple):
    """A task on `rank`, from `start` to `end`."""

    rank: int
    task: Task
    start: float
    end: float


def simulate_schedule(schedule: PipelineSchedule, ranks: int, batches: int, pieces: int = 2) -> list[TimedTask]:
    """The tasks of a step (of STEPS_IN_FLOW without a flush); `pieces` is the stages per rank when interleaved."""
    if not (1 <= ranks <= LARGEST and 1 <= batches <= LARGEST):
        raise UserError(f"a picture of {ranks} ranks and {batches} micro-batches; give 1 to {LARGEST} of each")
    if schedule == "zero-bubble":
        return list(_zero_bubble(ranks, batches))
    stages = {"interleaved": pieces, "zb-v": 2}.get(schedule, 1)
    if schedule == "interleaved" and batches % ranks:
        raise UserError(f"{batches} micro-batches are not a multiple of {ranks} ranks, as interleaving needs")
    if schedule == UNFLUSHED:
        orders = [list(_order("1f1b", rank, ranks, STEPS_IN_FLOW * batches, stages)) for rank in range(ranks)]
    elif schedule == "zb-v":
        orders = [[task for task in _v_order(rank, ranks, batches) if task.batch < batches] for rank in range(ranks)]
    else:
        orders = [list(_order(schedule, rank, ranks, batches, stages)) for rank in range(ranks)]
    tasks = _run_orders(orders, ranks, ranks * stages)
    if schedule == UNFLUSHED:
        return [timed._replace(task=timed.task._replace(batch=timed.task.batch % batches)) for timed in tasks]
    return [timed._replace(start=timed.start / stages, end=timed.end / stages) for timed in tasks]


def idle_share(tasks: list[TimedTask], ranks: int) -> float:
    """Share of the ranks' time, from the first start to the last end, in which they are idle."""
    total = ranks * max(timed.end for timed in tasks)
    return 1 - sum(timed.end - timed.start for timed in tasks) / total


def _order(schedule: PipelineSchedule, rank: int, ranks: int, batches: int, stages: int) -> Iterator[Task]:
    """Warm-up forwards, then one forward and one backward in turn, then the remaining backwards."""
    steps = batches * stages
    warm = {"gpipe": steps, "1f1b": ranks - rank - 1}.get(schedule, 2 * (ranks - rank - 1) + (stages - 1) * ranks)
    warm = min(warm, steps)
    forwards = [_task("forward", step, rank, ranks, stages) for step in range(steps)]
    backwards = [_task("backward", step, rank, ranks, stages) for step in range(steps)]
    yield from forwards[:warm]
    for forward, backward in zip(forwards[warm:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[steps - warm :]


def _v_order(rank: int, ranks: int, batches: int) -> list[Task]:
    """ZB-V: a rank fills with 2 K pieces, then each forward is followed by a whole backward; at the end gradients of
    inputs go first.

    The order is torch's; with fewer than 2 K − 1 micro-batches, tasks of the missing ones are left out by the caller.
    """
    down, up = rank, 2 * ranks - 1 - rank
    batches = max(batches, 2 * ranks - 1)
    forwards: list[tuple[Work, int]] = [("forward", up), ("forward", down)]
    inputs: list[tuple[Work, int]] = [("input", down), ("input", up)]
    backward_down: list[tuple[Work, int]] = [("input", down), ("weights", down)]
    through_up: list[tuple[Work, int]] = [("forward", up), ("input", up), ("weights", up)]
    works: list[tuple[Work, int]] = [("forward", down)] * (2 * (ranks - rank) - 1)
    works += forwards * rank
    works += through_up * (ranks - rank)
    downs, ups = 2 * ranks - rank - 1, ranks
    while ups < batches:
        if downs < batches:
            works.append(("forward", down))
        works += backward_down + through_up
        downs, ups = downs + 1, ups + 1
    works += inputs * rank
    works += backward_down * (ranks - rank)
    works += [("weights", up)] * rank
    works += [("weights", down)] * rank
    numbers = {kind: count() for kind in set(works)}
    return [Task(work, next(numbers[work, stage]), stage) for work, stage in works]


def _task(work: Work, step: int, rank: int, ranks: int, stages: int) -> Task:
    """The `step`-th forward or backward of a rank: its stages alternate, `ranks` micro-batches each."""
    turn = step // ranks % stages
    stage = turn if work == "forward" else stages - 1 - turn
    batch = step if stages == 1 else step // (ranks * stages) * ranks + step % ranks
    return Task(work, batch, stage * ranks + rank)


def _run_orders(orders: list[list[Task]], ranks: int, stages: int) -> Iterator[TimedTask]:
    """Each rank starts its next task as soon as the tasks it depends on have ended."""
    ended: dict[Task, int] = {}
    started, free = [0] * ranks, [0] * ranks
    while any(started[rank] < len(orders[rank]) for rank in range(ranks)):
        for rank in range(ranks):
            while started[rank] < len(orders[rank]):
                task = orders[rank][started[rank]]
                ready = _ready(task, ended, stages)
                if ready is None:
                    break
                start = max(ready, free[rank])
                free[rank] = ended[task] = start + DURATIONS[task.work]
                started[rank] += 1
                yield TimedTask(rank, task, start, free[rank])


def _ready(task: Task, ended: dict[Task, int], stages: int) -> int | None:
    """When the tasks that `task` depends on have ended; None while one has not."""
    needed = [ended.get(need) for need in _needs(task, stages)]
    return None if None in needed else max((end for end in needed if end is not None), default=0)


def _needs(task: Task, stages: int) -> Iterator[Task]:
    if task.work == "weights":
        yield task._replace(work="input")
    elif task.work == "forward":
        if task.stage:
            yield task._replace(stage=task.stage - 1)
    else:
        yield task._replace(work="forward")
        if task.stage < stages - 1:
            yield task._replace(stage=task.stage + 1)


def _zero_bubble(ranks: int, batches: int) -> Iterator[TimedTask]:
    """ZB-H1: per unit of time, the task that each rank runs."""
    ended: dict[Task, int] = {}
    done = [{"forward": 0, "input": 0, "weights": 0} for _ in range(ranks)]
    now = 0
    while any(counts["weights"] < batches for counts in done):
        chosen = [
            (rank, task) for rank in range(ranks) if (task := _next(rank, done[rank], ended, now, ranks, batches))
        ]
        for rank, task in chosen:
            done[rank][task.work] += 1
            ended[task] = now + 1
            yield TimedTask(rank, task, now, now + 1)
        now += 1


def _next(rank: int, counts: dict[str, int], ended: dict[Task, int], now: int, ranks: int, batches: int) -> Task | None:
    """The task a rank starts at `now`; None where it is idle."""
    works: tuple[Work, ...] = ("forward", "input", "weights")
    for work in works:
        if counts[work] == batches or (work == "forward" and _is_full(rank, counts, ranks)):
            continue
        task = Task(work, counts[work], rank)
        ready = _ready(task, ended, ranks)
        if ready is not None and ready <= now:
            return task
    return None


def _is_full(rank: int, counts: dict[str, int], ranks: int) -> bool:
    """Whether another forward would exceed the micro-batches that 1F1B has in flight here, or that rank 0 holds."""
    under_way, held = counts["forward"] - counts["input"], counts["forward"] - counts["weights"]
    return under_way >= ranks - rank or held >= ranks
