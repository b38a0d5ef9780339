"""What a plan leaves of the card is spent on time, never beyond the card, never against the user."""

from itertools import pairwise

import pytest

from tests.plan.questions import planned, question
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.plan.search.fill import fill_card
from tightfit.plan.search.search import COMFORT, SAME, cheapest_that_fits, search

ONE = Layout(micro_batch=1)


def test_free_bytes_buy_time_and_fit() -> None:
    asked = question("llama-3.1-8b", "H200", 32768, 1, host="100GB", precision="pure-bf16")
    coarse = search(asked.space).best
    assert coarse is not None
    fine = fill_card(asked.space, coarse)
    room = COMFORT * asked.machine.accelerator.memory_bytes
    assert fine.step_s < coarse.step_s
    assert coarse.gpu_bytes < fine.gpu_bytes <= room
    assert fine.levers.checkpoint_budget_bytes is not None
    assert planned("llama-3.1-8b", "H200", 32768, 1, host="100GB", precision="pure-bf16").plan.levers == fine.levers


def test_states_stay_where_there_is_room_for_them() -> None:
    pins = ("levers.offload=optimizer", "levers.checkpoint_every=1", "levers.tiles=1")
    plan = planned("llama-3.1-8b", "A100-80GB", 4096, 1, *pins, host="256GB").plan
    kept = plan.levers.offload_keep_bytes
    assert plan.levers.checkpoint_every == 1
    assert kept > 10 * 2**30
    assert plan.training_host_bytes == pytest.approx(12 * plan.workload.spec.params() - kept, rel=0.02)
    fixed = planned("llama-3.1-8b", "A100-80GB", 4096, 1, *pins, "levers.offload_keep_bytes=0", host="256GB").plan
    assert fixed.levers.offload_keep_bytes == 0
    assert fixed.step_seconds > plan.step_seconds


def test_nothing_is_spent_where_nothing_is_gained() -> None:
    asked = question("llama-3.2-1b", "H200", 2048, 4)
    best = search(asked.space).best
    assert best is not None
    assert fill_card(asked.space, best) is best


def test_the_cheapest_lever_that_makes_room() -> None:
    asked = question("llama-3.2-1b", "H100-80GB", 8192, 1, host="256GB")
    rooms = [gib * 2**30 for gib in (60, 24, 14, 8)]
    found = [cheapest_that_fits(asked.space, ONE, Levers(), room) for room in rooms]
    assert found[0] is not None
    assert found[0].levers == Levers()
    times = []
    for room, each in zip(rooms, found, strict=True):
        assert each is not None
        assert each.gpu_bytes <= room
        times.append(each.step_s)
    assert all(later >= earlier / SAME for earlier, later in pairwise(times))
    assert cheapest_that_fits(asked.space, ONE, Levers(), 2**30) is None
    lossy = Levers(optimizer_states="bf16")
    kept = cheapest_that_fits(
        question("llama-3.2-1b", "H100-80GB", 8192, 1, "levers.optimizer_states=bf16").space, ONE, lossy, rooms[1]
    )
    assert kept is not None
    assert kept.levers.optimizer_states == "bf16"
