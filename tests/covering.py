"""Of many cases, the few that `make test` runs: together they show every value that any of them has.

A case is taken apart into the values of its fields: of a layout, a lever, a model's shape. Cases are then taken one
after another, always the one that shows most of what was not shown yet, until every value has been (greedy set cover:
Chvátal, A Greedy Heuristic for the Set-Covering Problem, 1979); those that later ones made needless are let go. With
`pairs`, until every two values that stand in one case have stood together in a case that was taken: most faults of a
combination are faults of two of its settings (Kuhn, Wallace, Gallo, Software Fault Interactions, 2004).

The others are marked `thorough` and run by `make test-all`. Nothing is drawn: the same cases are taken every time, and
a case that is added with a new value in it is taken by itself.

Where cases are alike, and all of them take seconds, `sampled(n)` over a test has `make test` run one case in n.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import combinations
from typing import Any
from zlib import crc32

import pytest
from pydantic import BaseModel

Value = tuple[str, str]
"""Where it stands in the case, and what it is."""


def thorough(*values: Any) -> Any:
    """Values for `parametrize` that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def sampled(every: int) -> pytest.MarkDecorator:
    """Mark a test of whose cases `make test` runs one in `every`, the same ones every time."""
    return pytest.mark.sampled(every)


def leave_out_others(items: Iterable[pytest.Item]) -> None:
    """Mark as `thorough` the cases of `sampled` tests that are not in the sample.

    Cases are ordered by a hash of their name, so that a sample of crossed parameters has no pattern, and a case that is
    added leaves the order of the others.
    """
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("thorough"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for alike in cases.values():
        mark = alike[0].get_closest_marker("sampled")
        assert mark is not None
        kept = -(-len(alike) // mark.args[0])
        for item in sorted(alike, key=lambda item: crc32(item.nodeid.encode()))[kept:]:
            item.add_marker(pytest.mark.thorough)


def covering(
    cases: Mapping[str, Any] | Sequence[Any], pairs: bool = False, costly: Callable[[Any], bool] = lambda case: False
) -> list[Any]:
    """What to give to `parametrize`: names of a mapping's cases, or the cases themselves.

    What is `costly` is left to `make test-all` whatever it shows.
    """
    named = isinstance(cases, Mapping)
    values: list[Any] = list(cases.values()) if named else list(cases)
    given: list[Any] = list(cases) if named else values
    taken = set(chosen([frozenset() if costly(value) else shown(value, pairs) for value in values]))
    return [case if at in taken else _left_out(case) for at, case in enumerate(given)]


def _left_out(case: Any) -> Any:
    return thorough(*case) if isinstance(case, (tuple, list)) else thorough(case)


def chosen(shows: Sequence[frozenset[Any]]) -> list[int]:
    """Indices, in order, of cases that show all that any of them shows; without one of them something is not shown."""
    missing, taken = frozenset().union(*shows), []
    while missing:
        best = max(range(len(shows)), key=lambda at: (len(shows[at] & missing), -at))
        taken.append(best)
        missing -= shows[best]
    for at in sorted(taken, key=lambda at: len(shows[at])):
        if shows[at] <= frozenset().union(*(shows[other] for other in taken if other != at)):
            taken.remove(at)
    return sorted(taken)


def above_four_ranks(case: tuple[Any, ...]) -> bool:
    """Of a case with a layout as its second field: `make test` has few groups of eight processes."""
    return bool(case[1].ranks > 4)


def shown(case: Any, pairs: bool = False) -> frozenset[Any]:
    """The values of a case, or every two of them."""
    values = sorted(_values(case, ""))
    return frozenset(combinations(values, 2)) if pairs else frozenset(values)


def _values(case: Any, place: str) -> Iterable[Value]:
    for name, value in _fields(case):
        yield from _values(value, f"{place}.{name}")
    if not _fields(case):
        yield place, repr(case)


def _fields(case: Any) -> list[tuple[str, Any]]:
    if isinstance(case, BaseModel):
        return [(name, getattr(case, name)) for name in type(case).model_fields]
    if is_dataclass(case) and not isinstance(case, type):
        return [(field.name, getattr(case, field.name)) for field in fields(case)]
    if isinstance(case, Mapping):
        return [(str(name), value) for name, value in case.items()]
    return [(str(at), value) for at, value in enumerate(case)] if isinstance(case, (tuple, list)) else []
