"""Learning-rate schedules against their definitions."""

import math

import pytest

from tightfit.jobs.job import Schedule
from tightfit.train.schedule import lr_ratio


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_warmup_is_linear_and_reaches_the_peak(kind: str) -> None:
    schedule = Schedule(kind=kind, warmup_steps=4, final_ratio=0.1)  # type: ignore[arg-type]
    assert [lr_ratio(schedule, step, 100) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_cosine_matches_its_formula() -> None:
    schedule = Schedule(kind="cosine", warmup_steps=10, final_ratio=0.1)
    for step in range(10, 110):
        progress = (step - 10 + 1) / 100
        assert lr_ratio(schedule, step, 110) == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_last_step_is_at_the_final_ratio(kind: str) -> None:
    schedule = Schedule(kind=kind, warmup_steps=3, final_ratio=0.2)  # type: ignore[arg-type]
    assert lr_ratio(schedule, 49, 50) == pytest.approx(0.2)


def test_linear_is_linear_and_constant_is_constant() -> None:
    linear = [lr_ratio(Schedule(kind="linear", final_ratio=0.0), step, 10) for step in range(10)]
    assert linear == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0])
    assert {lr_ratio(Schedule(kind="constant"), step, 10) for step in range(10)} == {1.0}


def test_wsd_is_stable_then_decays() -> None:
    schedule = Schedule(kind="wsd", warmup_steps=2, final_ratio=0.0, decay_share=0.25)
    ratios = [lr_ratio(schedule, step, 20) for step in range(20)]
    assert ratios[:15] == [0.5] + [1.0] * 14
    assert ratios[15:] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])


def test_warmup_alone_and_beyond_the_end() -> None:
    schedule = Schedule(kind="cosine", warmup_steps=5)
    assert lr_ratio(schedule, 4, 5) == 1.0
    assert lr_ratio(Schedule(kind="linear", final_ratio=0.3), 99, 10) == pytest.approx(0.3)
