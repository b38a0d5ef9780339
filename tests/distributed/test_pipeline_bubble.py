"""Recorded schedules of real processes: the share of time their ranks wait, against (K−1)/(K+M−1).

Stages sleep for a known time instead of computing, so that the result hardly depends on how busy the machine is. What
a busy one adds is waiting of its own, which does not grow with the work: where a record waited too long, stages sleep
twice as long in the next.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from tests.covering import thorough
from tests.distributed.group import Group
from tests.distributed.piping import Piped
from tests.distributed.training import CPU, build, micro_batches
from tightfit.errors import UserError
from tightfit.jobs.layout import PipelineSchedule
from tightfit.parallel.mesh import make_mesh
from tightfit.parallel.pipeline import Pipeline
from tightfit.parallel.ranks import Ranks
from tightfit.report.pipeline import Record, draw_record, read_record, record_of
from tightfit.train.pipeline_record import record
from tightfit.train.precision import LossScale
from tightfit.train.step import ignore, train_step

Make = Callable[[int], Group]
FORWARD_S = 0.04
ATTEMPTS = 7
"""The last with 2.6 s instead."""


def run_recorded(case: Piped, forward_s: float) -> dict[str, Any]:
    mesh = make_mesh(case.layout, "cpu")
    ranks = Ranks.of(mesh)
    _, module, optimizer = build(case, mesh)
    assert isinstance(module, Pipeline)
    batches = micro_batches(case, 0, ranks.rank)
    train_step(module, optimizer, batches, CPU, 1e-3, LossScale(), ranks=ranks)  # which connects the ranks
    for stage in module.stages:
        slow_down([*stage.layers][-1], forward_s / case.stages_per_rank)
    with record(module, ranks) as found:
        train_step(module, optimizer, batches, CPU, 1e-3, LossScale(), ranks=ranks)
    return found


def slow_down(layer: Any, seconds: float) -> None:
    """A layer that sleeps: forward, as long again for the gradient of its input, and for that of its weights."""

    def sleep(_: object) -> None:
        time.sleep(seconds)

    def after(module: nn.Module, given: Any, made: tuple[Tensor, Any]) -> None:
        sleep(None)
        made[0].register_hook(sleep)

    layer.register_forward_hook(after)
    layer.attention.o.weight.register_hook(sleep)


def recorded(group: Make, case: Piped, most: float, run: Callable[..., dict[str, Any]] = run_recorded) -> Record:
    """The first record whose ranks waited for less than `most` of the time, or the last."""
    for attempt in range(ATTEMPTS):
        records = group(2).run(run, case, FORWARD_S * 2**attempt)
        assert not records[1], "the first process has the records of all"
        made = record_of(records[0])
        if made.waited < most:
            break
    assert (made.ranks, made.micro_batches, made.pieces) == (2, 4, case.stages_per_rank)
    return made


def piped(schedule: PipelineSchedule, pieces: int = 1) -> Piped:
    return Piped(schedule=schedule, stages_per_rank=pieces, rows=8, micro_batch=2)


@pytest.mark.parametrize("schedule", ["1f1b", thorough("gpipe")])
def test_the_measured_bubble_is_the_formulas(group: Make, schedule: PipelineSchedule, tmp_path: Path) -> None:
    made = recorded(group, piped(schedule), most=1.2 / 5)
    assert len(made.tasks) == 2 * 2 * 4, "a forward and a backward of four micro-batches on two ranks"
    assert all(
        timed.end - timed.start >= FORWARD_S * (1 if timed.task.work == "forward" else 2) for timed in made.tasks
    )
    assert made.formula == pytest.approx(1 / 5)
    assert made.waited == pytest.approx(made.formula, rel=0.2)
    draw_record(made, tmp_path / "pipeline.svg")
    drawn = (tmp_path / "pipeline.svg").read_text()
    assert f"{made.waited:.1%}" in drawn
    assert "20.0%" in drawn


def test_interleaved_and_zero_bubble_wait_less(group: Make) -> None:
    """Less than 0.8 of what 1F1B waits, which is (K−1)/(K−1+M) = 1/5 at least."""
    interleaved = recorded(group, piped("interleaved", 2), most=1.35 / 9)
    assert interleaved.formula == pytest.approx(1 / 9)
    assert interleaved.waited == pytest.approx(interleaved.formula, rel=0.35)
    split = recorded(group, piped("zero-bubble"), most=0.8 / 5)
    assert {timed.task.work for timed in split.tasks} == {"forward", "input", "weights"}
    assert split.waited < 0.8 / 5
    assert recorded(group, piped("zb-v", 2), most=0.8 / 5).waited < 0.8 / 5


def test_without_a_flush_ranks_wait_once_for_all_steps(group: Make) -> None:
    """Three steps: 1F1B waits (K−1)/(K−1+M) = 1/5 of the time, 2BW (K−1)/(K−1+3M), as the next step is under way."""
    made = recorded(group, piped("2bw"), most=0.7 / 5, run=run_flow)
    assert made.steps == 3
    assert made.formula == pytest.approx(1 / 13)
    assert made.waited < 0.7 / 5
    first_rank = [timed.task for timed in sorted(made.tasks, key=lambda timed: timed.start) if timed.rank == 0]
    assert [(task.work, task.batch) for task in first_rank[7:10]] == [("forward", 0), ("backward", 3), ("forward", 1)]


def run_flow(case: Piped, forward_s: float) -> dict[str, Any]:
    mesh = make_mesh(case.layout, "cpu")
    ranks = Ranks.of(mesh)
    _, module, optimizer = build(case, mesh)
    buffered = optimizer.buffered
    assert isinstance(module, Pipeline)
    assert buffered is not None
    batches = micro_batches(case, 0, ranks.rank)
    buffered.take_alone(batches, CPU, 1e-3, ignore, ranks)  # which connects the ranks
    slow_down([*module.stages[0].layers][-1], forward_s)
    with record(module, ranks) as found:
        for _ in range(3):
            buffered.take(batches, CPU, 1e-3, ignore, ranks)
        buffered.finish(ignore, ranks)
    return found


def test_what_is_no_record_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read record of a pipeline"):
        read_record(tmp_path)


@pytest.mark.parametrize("end_s", [0.0, -0.0, 1.0])
def test_a_record_in_which_nothing_took_time_gets_a_sentence(tmp_path: Path, end_s: float) -> None:
    slot = {"rank": 0, "work": "forward", "batch": 0, "stage": 0, "start_s": end_s, "end_s": 0.0}
    record = {"schedule": "1f1b", "ranks": 2, "micro_batches": 2, "pieces": 1, "slots": [slot, slot]}
    (tmp_path / "pipeline.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="is not the record of a pipeline"):
        read_record(tmp_path)
