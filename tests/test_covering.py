"""Chosen cases show every value, or every two, that any case shows; the others are left to `make test-all`."""

from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import pytest

from tests.covering import chosen, covering, leave_out_others, sampled, shown
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


class Collected:
    """What pytest knows of a collected case, as far as samples ask for it."""

    def __init__(self, nodeid: str, *marks: pytest.MarkDecorator) -> None:
        self.nodeid, self.marks = nodeid, [mark.mark for mark in marks]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.mark)

    @property
    def is_left_out(self) -> bool:
        return self.get_closest_marker("thorough") is not None


def test_a_sample_is_one_case_in_so_many_and_new_cases_leave_it_as_it_is() -> None:
    def left_out(*names: str) -> dict[str, bool]:
        cases: list[Any] = [Collected(f"a.py::t[{name}]", sampled(3)) for name in names]
        cases += [Collected("a.py::t[long]", sampled(3), pytest.mark.thorough), Collected("a.py::other[1]")]
        leave_out_others(cases)
        assert cases[-2].is_left_out
        assert not cases[-1].is_left_out
        return {case.nodeid: case.is_left_out for case in cases[:-2]}

    seven = left_out(*"abcdefg")
    assert sorted(seven.values()) == [False] * 3 + [True] * 4
    assert not left_out("a")["a.py::t[a]"], "of one case, one"
    kept = {name for name, left in seven.items() if not left}
    assert len(kept & {name for name, left in left_out(*"abcdefgh").items() if not left}) >= 2
