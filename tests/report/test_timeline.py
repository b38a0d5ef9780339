"""Timelines: their phases and points by hand, from replays and histories, and a picture that names what it shows."""

from pathlib import Path

import pytest

from tests.report.test_memory_pictures import text_of
from tightfit.errors import UserError
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.trace import Allocation, Replay, Trace
from tightfit.models.presets import preset
from tightfit.plan.search.pins import parse_pins
from tightfit.prove.rehearsal import trace_training_step
from tightfit.report.simulated import simulate_timeline
from tightfit.report.timeline import Timeline, draw_timelines, of_replay, of_simulation

MIB = 2**20
REPLAY = Replay(
    [1, 2, 3, 4, 5, 6], [8] * 6, [(0, "init"), (1, "forward"), (3, "backward"), (4, "backward"), (5, "optimizer")], []
)


def test_part_of_a_replay_by_number() -> None:
    found = of_replay(REPLAY, slice(2, 6))
    assert found.positions == [0, 1, 2, 3]
    assert found.allocated_bytes == [3, 4, 5, 6]
    assert found.reserved_bytes == [8] * 4
    assert found.unit == "allocations and frees"
    assert found.phases() == [("forward", 0, 1), ("backward", 1, 3)], "the optimizer begins where the curve ends"
    assert (found.peak_bytes, found.peak_reserved_bytes) == (6, 8)


def test_part_of_a_replay_by_time() -> None:
    found = of_replay(REPLAY, slice(1, 5), times_us=[0, 1000, 1500, 4000, 9000, 9500])
    assert found.positions == [0, 0.5, 3, 8]
    assert found.unit == "milliseconds"
    assert found.phases() == [("forward", 0, 3), ("backward", 3, 8)]


def test_phases_without_events_are_not_shown() -> None:
    line = Timeline(
        [0, 1, 2, 3], [1] * 4, [1] * 4, [(0, "init"), (0, "forward"), (1, "loss"), (1, "forward"), (2, "loss")]
    )
    assert line.phases() == [("forward", 0, 2), ("loss", 2, 3)]
    assert Timeline().phases() == []


def test_thinned_keeps_the_highest_of_each_stretch() -> None:
    line = Timeline([0, 1, 2, 3, 4, 5], [1, 9, 2, 3, 8, 4], [10, 11, 12, 13, 14, 15])
    few = line.thinned(points=2)
    assert (few.positions, few.allocated_bytes, few.reserved_bytes) == ([1, 4], [9, 8], [11, 14])
    assert line.thinned() == line


def one_step() -> Trace:
    """Weights, then a step of an activation and a gradient."""
    trace = Trace()
    trace.begin("init")
    trace.allocate(Allocation(4 * MIB, "weights"))
    trace.step_start = len(trace.events)
    trace.begin("forward")
    kept = trace.allocate(Allocation(2 * MIB, "activations"))
    trace.begin("backward")
    gradient = trace.allocate(Allocation(4 * MIB, "gradients"))
    for number in (kept, gradient):
        trace.free(number)
    return trace


def test_the_second_simulated_step_has_its_weights() -> None:
    found = of_simulation(one_step())
    assert [count // MIB for count in found.allocated_bytes] == [6, 10, 8, 4]
    assert [phase for phase, *_ in found.phases()] == ["forward", "backward"]


@pytest.mark.parametrize("pins", [[], ["layout.data=2", "layout.zero=3", "levers.checkpoint_every=1"]])
def test_a_simulated_step_peaks_where_the_simulation_says(pins: list[str]) -> None:
    spec = preset("tiny-llama")
    found = simulate_timeline(spec, parse_pins(pins), sequence_length=64, precision="bf16")
    layout = Layout.model_validate({"micro_batch": 1, **parse_pins(pins).layout})
    workload = Workload(spec=spec, sequence_length=64, global_batch=layout.data)
    step = trace_training_step(workload, layout, Levers.model_validate(parse_pins(pins).levers)).replay()
    peak_bytes = max(moment.allocated_bytes for moment in step.peaks if moment.phase != "init")
    assert 0 <= found.peak_bytes - peak_bytes <= 1024, "the first step leaves a scalar or two behind"
    assert [phase for phase, *_ in found.phases()] == ["forward", "loss", "backward", "optimizer"]


def test_a_picture_names_phases_and_peaks(tmp_path: Path) -> None:
    positions = [float(i) for i in range(100)]
    starts = [(0.0, "forward"), (40.0, "loss"), (41.0, "backward"), (90.0, "optimizer")]
    line = Timeline(positions, [i * MIB for i in range(100)], [120 * MIB] * 100, starts, "milliseconds")
    draw_timelines({"before": line, "after": line}, "two steps", tmp_path / "two.svg")
    words = text_of(tmp_path / "two.svg")
    for word in (
        "before: peak 99.0 MiB allocated, 120.0 MiB reserved",
        "after: peak",
        "two steps",
        "milliseconds",
        "forward",
        "loss",
        "backward",
        "optimizer",
        "reserved",
        "peak allocated",
    ):
        assert word in words
    host = Timeline(positions, line.allocated_bytes, line.allocated_bytes, starts, "allocations and frees")
    draw_timelines({"": host}, "one step", tmp_path / "one.svg")
    words = text_of(tmp_path / "one.svg")
    assert "peak 99.0 MiB allocated" in words
    assert "reserved" not in words


def test_mistakes_get_a_sentence() -> None:
    spec = preset("tiny-llama")
    for pins, rows, words in (
        (["layout.zero=3"], None, "nobody to split with"),
        (["layout.data=2", "layout.expert=2"], None, "has no experts"),
        (["layout.micro_batch=4"], 6, "6 rows is not a multiple of 4"),
    ):
        with pytest.raises(UserError, match=words):
            simulate_timeline(spec, parse_pins(pins), sequence_length=64, precision="bf16", global_batch=rows)
    with pytest.raises(UserError, match="sequence_length is 100000"):
        simulate_timeline(spec, parse_pins([]), sequence_length=100_000, precision="bf16")
