"""Runs that others published are predicted as well as docs/published.md says, without a constant per run."""

from pathlib import Path

import pytest

from benchmarks.published import GroupErrors, Run, group_errors, read_runs
from benchmarks.reports.published import draw_published

ENOUGH = 3
"""Runs of a group whose bias means something."""


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return read_runs()


@pytest.fixture(scope="module")
def speed(runs: list[Run]) -> dict[str, GroupErrors]:
    return {each.group: each for each in group_errors(runs, Run.speed_error)}


def test_speed_is_within_a_fifth_and_no_group_is_off_by_a_tenth(speed: dict[str, GroupErrors]) -> None:
    assert speed["all"].rows == 156
    assert speed["all"].mean < 0.10
    assert speed["part: held out"].mean < 0.10
    assert [each for each in speed.values() if each.rows >= ENOUGH and abs(each.bias) > 0.10] == []


def test_memory_of_other_engines_is_within_a_tenth(runs: list[Run]) -> None:
    memory = {each.group: each for each in group_errors(runs, Run.memory_error)}
    assert memory["all"].rows == 25
    assert memory["all"].mean < 0.10
    assert memory["part: held out"].mean < 0.10


def test_parts_are_the_same_every_time(runs: list[Run]) -> None:
    again = {run.name: run.is_fitted for run in read_runs()}
    assert all(again[run.name] == run.is_fitted for run in runs)
    assert 0.6 < sum(again.values()) / len(again) < 0.7


def test_errors_by_hand(runs: list[Run]) -> None:
    run = runs[0]
    tokens_s_gpu = run.workload.tokens / run.time().step_s / run.machine.ranks
    assert run.speed_error() == pytest.approx(tokens_s_gpu / run.tokens_s_gpu - 1)
    errors = {each.group: each for each in group_errors(runs[:2], lambda each: 0.5 if each is runs[0] else -0.1)}
    assert errors["all"].mean == pytest.approx(0.3)
    assert errors["all"].bias == pytest.approx(0.2)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "published.svg"
    draw_published(path)
    assert "nanotron" in path.read_text(encoding="utf-8")
