"""Ledgers add up, survive JSON, and refuse what is none."""

import json
from typing import Any

import pytest

from tightfit.errors import UserError
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.training import training_ledger
from tightfit.memory.ledger import Ledger, Line
from tightfit.models.presets import preset

LEDGER = Ledger(
    "measurement",
    (
        Line(component="weights", phase="forward", bytes=10),
        Line(component="activations", phase="forward", bytes=5, detail="attention", why="kept"),
        Line(component="activations", phase="forward", bytes=2, detail="mlp"),
        Line(component="allocator slack", phase="forward", bytes=3),
        Line(component="cuda context", phase="forward", bytes=100),
        Line(component="weights", phase="backward", bytes=16, rank=1),
        Line(component="optimizer states", phase="optimizer", bytes=7, place="host"),
    ),
)


def test_lines_of_a_moment_add_up() -> None:
    assert LEDGER.allocated_bytes("forward") == 17
    assert LEDGER.by_component("forward") == {
        "weights": 10,
        "activations": 7,
        "allocator slack": 3,
        "cuda context": 100,
    }
    assert LEDGER.fullest() == ("forward", 0)
    assert LEDGER.peak_allocated_bytes() == 17
    assert LEDGER.peak_reserved_bytes() == 20
    assert LEDGER.peak_bytes() == 120
    assert LEDGER.peak_bytes("host") == 7
    assert LEDGER.moments() == [("forward", 0), ("backward", 1)]
    assert LEDGER.total(lambda line: line.component == "weights") == 26
    more = LEDGER.with_lines([Line(component="inputs", phase="backward", bytes=2, rank=1)])
    assert more.fullest() == ("backward", 1)


def test_an_empty_place_is_said_so() -> None:
    assert Ledger("formulas", ()).peak_bytes() == 0
    with pytest.raises(UserError, match="no line for the host"):
        Ledger("formulas", LEDGER.lines[:1]).fullest("host")


@pytest.mark.parametrize("layout", [Layout(), Layout(pipeline=4, micro_batch=1), Layout(data=8, zero=3, micro_batch=1)])
def test_json_and_back(layout: Layout) -> None:
    workload = Workload(spec=preset("llama-3.2-1b"), sequence_length=1024, global_batch=64)
    for ledger in (LEDGER, training_ledger(workload, layout, Levers(checkpoint_every=1, offload="optimizer"))):
        text = json.dumps(ledger.to_json())
        assert Ledger.from_json(json.loads(text), "here") == ledger


GOOD: dict[str, Any] = LEDGER.to_json()


@pytest.mark.parametrize(
    "bad",
    [
        None,
        3,
        "ledger",
        [],
        {},
        {"source": "formulas"},
        {**GOOD, "source": "guesses"},
        {**GOOD, "source": ["formulas"]},
        {**GOOD, "lines": 7},
        {**GOOD, "lines": [None]},
        {**GOOD, "lines": [{"component": "weights"}]},
        {**GOOD, "lines": [{**GOOD["lines"][0], "component": "hope"}]},
        {**GOOD, "lines": [{**GOOD["lines"][0], "phase": "lunch"}]},
        {**GOOD, "lines": [{**GOOD["lines"][0], "place": "moon"}]},
        {**GOOD, "lines": [{**GOOD["lines"][0], "bytes": "10"}]},
        {**GOOD, "lines": [{**GOOD["lines"][0], "bytes": 1.5}]},
        {**GOOD, "lines": [{**GOOD["lines"][0], "bytes": True}]},
        {**GOOD, "lines": [{**GOOD["lines"][0], "surprise": 1}]},
    ],
)
def test_anything_else_is_refused_in_one_sentence(bad: Any) -> None:
    with pytest.raises(UserError, match=r"^plan\.json is not a ledger \(.*\); make one with") as caught:
        Ledger.from_json(bad, "plan.json")
    assert "\n" not in str(caught.value)
