"""Chosen cases show every value, or every two, that any case shows; the others are left to `make test-all`."""

from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import pytest

from tests.covering import chosen, covering, shown
from tightfit.jobs.layout import Layout

GRID = [{"a": a, "b": b, "c": c} for a, b, c in product(range(3), range(4), "xy")]


def settings(cases: list[dict[str, Any]], size: int) -> set[Any]:
    return {values for case in cases for values in combinations(sorted(case.items()), size)}


@pytest.mark.parametrize(("pairs", "size", "fewest"), [(False, 1, 4), (True, 2, 12)])
def test_every_setting_is_in_a_chosen_case(pairs: bool, size: int, fewest: int) -> None:
    """As few as there can be are as many as the longest list has, or the longest two have pairs."""
    kept = [GRID[at] for at in chosen([shown(case, pairs) for case in GRID])]
    assert settings(kept, size) == settings(GRID, size)
    assert fewest <= len(kept) < fewest * 1.5


def test_none_is_taken_whose_values_the_others_show() -> None:
    """The widest is taken first, and is needless once those beside it are there."""
    assert chosen([frozenset("abc"), frozenset("bcde"), frozenset("def")]) == [0, 2]


@dataclass(frozen=True)
class Case:
    layout: Layout
    rows: int = 8


def test_cases_are_taken_apart() -> None:
    values = shown({"first": Case(Layout(data=2)), "second": [1, None]})
    assert {(".first.layout.data", "2"), (".first.rows", "8"), (".second.1", "None")} <= values
    assert not any(place == ".first" for place, _ in values)


def test_a_case_with_a_value_of_its_own_is_taken() -> None:
    cases = {"a": Case(Layout(data=2)), "b": Case(Layout(data=2)), "c": Case(Layout(data=4), rows=9)}
    made = covering(cases)
    assert made[0] == "a"
    assert made[2] == "c"
    assert made[1].values == ("b",)
    assert [mark.name for mark in made[1].marks] == ["thorough"]


def test_what_is_costly_is_left_out() -> None:
    made = covering([(1, "x"), (2, "y")], costly=lambda case: case[1] == "y")
    assert made[0] == (1, "x")
    assert made[1].values == (2, "y")


def test_cases_without_names_are_given_whole() -> None:
    made = covering([(1, "x"), (1, "x"), (2, "y")])
    assert made[0] == (1, "x")
    assert made[1].values == (1, "x")
