"""Errors of hand-made ledgers, worked out by hand; and where ledgers are read from."""

import json
from pathlib import Path
from typing import Any

import pytest

from tightfit.errors import UserError
from tightfit.memory.comparison import Pair, compare, read_ledger
from tightfit.memory.ledger import Component, Ledger, Line, Phase, Place, Source


def ledger(source: Source, *rows: tuple[Phase, Component, int], place: Place = "gpu", rank: int = 0) -> Ledger:
    lines = [Line(phase=phase, component=what, bytes=size, place=place, rank=rank) for phase, what, size in rows]
    return Ledger(source, tuple(lines))


PREDICTED = ledger(
    "formulas",
    ("forward", "weights", 100),
    ("forward", "activations", 60),
    ("backward", "weights", 100),
    ("backward", "activations", 50),
    ("backward", "gradients", 30),
    ("backward", "workspace", 20),
    ("backward", "allocator slack", 10),
    ("backward", "cuda context", 7),
    ("save", "weights", 100),
)
MEASURED = ledger(
    "measurement",
    ("forward", "weights", 100),
    ("forward", "activations", 80),
    ("backward", "weights", 100),
    ("backward", "activations", 100),
    ("backward", "communication", 50),
    ("backward", "allocator slack", 150),
    ("evaluation", "weights", 100),
)


def test_every_line_of_the_common_phases() -> None:
    found = compare(PREDICTED, MEASURED)
    assert found.pairs == (
        Pair("forward", "weights", 100, 100),
        Pair("forward", "activations", 60, 80),
        Pair("forward", None, 160, 180),
        Pair("backward", "weights", 100, 100),
        Pair("backward", "activations", 50, 100),
        Pair("backward", "communication", 0, 50),
        Pair("backward", "gradients", 30, 0),
        Pair("backward", "workspace", 20, 0),
        Pair("backward", None, 200, 250),
    )
    errors = [pair.error for pair in found.pairs]
    assert errors == [
        0,
        pytest.approx(-0.25),
        pytest.approx(160 / 180 - 1),
        0,
        -0.5,
        -1,
        None,
        None,
        pytest.approx(-0.2),
    ]


def test_peaks_are_the_whole_runs() -> None:
    found = compare(PREDICTED, MEASURED)
    assert found.allocated == Pair("backward", None, 200, 250)
    assert found.reserved == Pair("backward", None, 210, 400)
    assert found.reserved.error == pytest.approx(-0.475)
    assert found.place == "gpu"


def test_beside_a_host_only_tensors_count() -> None:
    measured = ledger("measurement", ("backward", "weights", 90), ("backward", "activations", 90), place="host")
    found = compare(PREDICTED, measured)
    assert found.reserved is None
    assert found.allocated == Pair("backward", None, 180, 180)
    assert {pair.component for pair in found.pairs} == {"weights", "activations", "gradients", None}


def test_the_rank_that_needs_most_speaks_for_all() -> None:
    small, large = (ledger("formulas", ("forward", "weights", size), rank=r) for r, size in ((0, 10), (1, 30)))
    found = compare(small.with_lines(large.lines), ledger("measurement", ("forward", "weights", 20)))
    assert found.pairs[0] == Pair("forward", "weights", 30, 20)
    assert found.allocated.error == pytest.approx(0.5)


def test_as_plain_data() -> None:
    data = json.loads(json.dumps(compare(PREDICTED, MEASURED).to_json()))
    assert data["allocated"]["error"] == pytest.approx(-0.2)
    assert data["lines"][1] == {
        "phase": "forward",
        "component": "activations",
        "predicted_bytes": 60,
        "measured_bytes": 80,
        "error": -0.25,
    }


def test_ledgers_are_found_in_plans_files_and_directories(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"format": 1, "ledger": PREDICTED.to_json()}))
    assert read_ledger(tmp_path / "plan.json") == PREDICTED
    assert read_ledger(tmp_path) == PREDICTED, "a directory that holds a plan alone"
    (tmp_path / "ledger.json").write_text(json.dumps({**MEASURED.to_json(), "device": "a GPU"}))
    assert read_ledger(tmp_path / "ledger.json") == read_ledger(tmp_path) == MEASURED


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "1)); give a plan, a ledger or a run's directory"),
        ("[1, 2]", "is not a ledger"),
        ('{"ledger": {"source": "guess", "lines": []}}', "is not a ledger (source 'guess')"),
        ('{"source": "measurement", "lines": [{"component": "weights"}]}', "is not a ledger"),
        ('{"source": "measurement", "lines": []}', "is empty"),
    ],
)
def test_what_is_no_ledger_gets_a_sentence(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(UserError) as raised:
        read_ledger(tmp_path / "x.json")
    assert words in str(raised.value)
    assert str(tmp_path / "x.json") in str(raised.value)


def test_where_there_is_nothing_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no ledger.json or plan.json; make one with `tightfit measure"):
        read_ledger(tmp_path)
    with pytest.raises(UserError, match=r"cannot read .*absent"):
        read_ledger(tmp_path / "absent")


def test_a_ledger_of_another_place_only(tmp_path: Path) -> None:
    """A prediction that keeps nothing on the GPU is compared in the host's memory."""
    rows: list[Any] = [("forward", "weights", 5)]
    found = compare(ledger("formulas", *rows, place="host"), ledger("measurement", *rows, place="host"))
    assert (found.place, found.allocated.error, found.reserved) == ("host", 0, None)
