"""benchmarks/context_rows.py: rows as long as published ones, which fit while longer ones do not."""

import pytest

from benchmarks.context_rows import CASES, HOST, STEP_TOKENS, fits, longest, row_of
from benchmarks.reports.context_rows import longest_row_lines, longest_rows
from benchmarks.rows import RESULTS
from tightfit.hardware.machine import parse_machine


@pytest.mark.parametrize("name", CASES)
def test_rows_are_at_least_as_long_as_published_ones(name: str) -> None:
    case = CASES[name]
    machine = parse_machine(case.on, HOST)
    found = longest(case, machine)
    assert fits(case, machine, found)
    assert not fits(case, machine, found + STEP_TOKENS)
    assert found >= case.published_tokens
    row = row_of(name, found, None)
    assert float(row["peak_gib"]) <= float(row["card_gib"])
    assert float(row["host_gib"]) <= float(row["host_of_gib"])


def test_the_page_tells_every_case_and_every_line() -> None:
    assert len(longest_rows(RESULTS)[1]) == len(CASES)
    header, lines = longest_row_lines(RESULTS)
    assert len(header) == 5
    assert "activations" in [line[0] for line in lines]
