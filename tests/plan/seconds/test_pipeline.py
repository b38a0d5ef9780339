"""Bubbles against schedules that are played through, event by event."""

import pytest

from tightfit.jobs.layout import Layout
from tightfit.plan.seconds.pipeline import bubble_s, bubble_share
from tightfit.report.pipeline_schedule import STEPS_IN_FLOW, simulate_schedule

F, B = 1.0, 2.0


def idle_s(schedule: str, ranks: int, stages: int = 1, recompute_s: float = 0.0, micro: int = 64) -> float:
    layout = Layout.model_validate({"pipeline": ranks, "schedule": schedule, "stages_per_rank": stages})
    return bubble_s(layout, micro_batches=micro, forward_s=F, backward_s=B, recompute_s=recompute_s)


def orders(schedule: str, ranks: int, micro: int) -> list[list[tuple[str, int]]]:
    """What each rank does one after another: forward or backward of which micro-batch."""
    every = range(micro)
    if schedule == "gpipe":
        return [[("f", m) for m in every] + [("b", m) for m in every] for _ in range(ranks)]
    made = []
    for rank in range(ranks):
        ahead = min(micro, ranks - rank - 1)
        steps = [("f", m) for m in range(ahead)]
        for m in range(micro - ahead):
            steps += [("f", ahead + m), ("b", m)]
        made.append(steps + [("b", m) for m in range(micro - ahead, micro)])
    return made


def played(schedule: str, ranks: int, micro: int) -> float:
    """When the last rank is done: every step waits for its rank and for its neighbour's result."""
    done: dict[tuple[str, int, int], float] = {}
    free = [0.0] * ranks
    waiting = [list(order) for order in orders(schedule, ranks, micro)]
    while any(waiting):
        for rank, order in enumerate(waiting):
            while order:
                kind, m = order[0]
                before = ("f", rank - 1, m) if kind == "f" else ("b", rank + 1, m)
                at_the_end = rank == (0 if kind == "f" else ranks - 1)
                if not at_the_end and before not in done:
                    break
                start = max(free[rank], 0.0 if at_the_end else done[before])
                free[rank] = done[kind, rank, m] = start + (F if kind == "f" else B)
                order.pop(0)
    return max(free)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (2, 1), (4, 1), (4, 4), (4, 16), (8, 8)])
def test_the_formula_is_what_a_schedule_takes(schedule: str, ranks: int, micro: int) -> None:
    work = micro * (F + B)
    assert played(schedule, ranks, micro) == pytest.approx(work + idle_s(schedule, ranks))


@pytest.mark.parametrize(("ranks", "micro"), [(2, 1), (2, 4), (4, 2), (4, 4), (4, 5), (4, 7), (4, 16), (8, 8), (8, 32)])
def test_a_v_waits_as_its_schedule_played_through(ranks: int, micro: int) -> None:
    """Where backward for inputs, for weights, and forward take equally long."""
    end = max(task.end for task in simulate_schedule("zb-v", ranks, micro))
    assert end - micro * (F + B) == pytest.approx(idle_s("zb-v", ranks, stages=2, micro=micro))


def test_shares_of_the_papers() -> None:
    assert bubble_share(4, 1) == pytest.approx(3 / 4)  # naive: (K−1)/K
    assert bubble_share(4, 8) == pytest.approx(3 / 11)  # (K−1)/(K+M−1)
    work = 8 * (F + B)
    idle = idle_s("1f1b", 4)
    assert idle / (idle + work) == pytest.approx(bubble_share(4, 8))
    idle = idle_s("interleaved", 4, 2)
    assert idle / (idle + work) == pytest.approx(bubble_share(4, 8, 2))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("micro", [1, 2, 3, 4, 8, 16])
def test_zero_bubble_fills_a_wait_with_each_micro_batch(ranks: int, micro: int) -> None:
    """Against the schedule played unit by unit: forward, backward for inputs and for weights take one each."""
    end = max(task.end for task in simulate_schedule("zero-bubble", ranks, micro))
    assert end == pytest.approx(micro * (F + B) + idle_s("zero-bubble", ranks, micro=micro))


def test_zero_bubble_leaves_forward_and_recompute() -> None:
    assert idle_s("zero-bubble", 4) == pytest.approx(idle_s("1f1b", 4) / 3)
    assert idle_s("zero-bubble", 4, recompute_s=1.0) == pytest.approx(3 * (F + 1.0))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("micro", [8, 16])
def test_without_a_flush_a_step_costs_its_work(ranks: int, micro: int) -> None:
    """Steps played one after another: those of 1F1B wait each, those of 2BW once, to fill and to run empty."""
    end = max(task.end for task in simulate_schedule("2bw", ranks, micro))
    assert idle_s("2bw", ranks, micro=micro) == 0
    assert end == pytest.approx(STEPS_IN_FLOW * micro * (F + B) + idle_s("1f1b", ranks, micro=micro))
