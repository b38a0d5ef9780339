"""Traces replayed: what is alive when, steps repeated, and ledgers that add up to what was allocated."""

import random

import pytest

from tightfit.memory.allocator import CachingAllocator, PlainAllocator
from tightfit.memory.formulas.segments import rounded
from tightfit.memory.ledger import PHASES, Component, Phase
from tightfit.memory.trace import (
    CARRIED_STEPS,
    Allocation,
    PhasePeak,
    Trace,
    largest_alive,
    ledger_of,
    peak_of_each_phase,
)

MIB = 2**20
COMPONENTS: tuple[Component, ...] = ("weights", "gradients", "activations", "workspace")


def step_trace() -> Trace:
    """Weights before the step; in it an activation that backward frees, and a gradient that outlives the step."""
    trace = Trace()
    trace.begin("init")
    trace.allocate(Allocation(100, "weights"))
    trace.step_start = len(trace.events)
    trace.begin("forward")
    kept = trace.allocate(Allocation(40, "activations", "mlp"))
    passing = trace.allocate(Allocation(30, "activations", "attention"))
    trace.free(passing)
    trace.begin("backward")
    trace.allocate(Allocation(50, "gradients"))
    trace.free(kept)
    return trace


def held(moment: PhasePeak) -> list[tuple[str, str, int]]:
    return [(a.component, a.detail, a.bytes) for a in moment.alive]


def test_one_step_by_hand() -> None:
    replay = step_trace().replay(PlainAllocator(), steps=1)
    assert replay.allocated_bytes == [100, 140, 170, 140, 190, 150]
    assert replay.starts == [(0, "init"), (1, "forward"), (4, "backward")]
    assert replay.peak_allocated_bytes == replay.peak_reserved_bytes == 190
    by_phase = {moment.phase: moment for moment in replay.peaks}
    assert [(phase, moment.allocated_bytes) for phase, moment in by_phase.items()] == [
        ("init", 100),
        ("forward", 170),
        ("backward", 190),
    ]
    assert held(by_phase["forward"]) == [
        ("weights", "", 100),
        ("activations", "mlp", 40),
        ("activations", "attention", 30),
    ]
    assert held(by_phase["backward"]) == [("weights", "", 100), ("activations", "mlp", 40), ("gradients", "", 50)]
    assert replay.fullest.phase == "backward"


def test_a_repeated_step_begins_with_what_the_last_one_left() -> None:
    """The first step's gradient is alive in the second's forward, and is replaced, not doubled, in its backward."""
    replay = step_trace().replay(PlainAllocator(), steps=3)
    once = [190, 220, 190, 190, 150]
    assert replay.allocated_bytes == [100, 140, 170, 140, 190, 150, *once, *once]
    assert [phase for _, phase in replay.starts].count("forward") >= 3
    by_phase = {moment.phase: moment for moment in replay.peaks}
    assert by_phase["forward"].allocated_bytes == 220
    assert ("gradients", "", 50) in held(by_phase["forward"])
    assert held(by_phase["backward"]).count(("gradients", "", 50)) == 1
    assert replay.fullest.phase == "forward"


def test_memory_of_before_that_a_step_frees_is_gone_in_the_next() -> None:
    trace = Trace()
    trace.begin("init")
    early = trace.allocate(Allocation(60, "weights"))
    trace.step_start = len(trace.events)
    trace.begin("forward")
    made = trace.allocate(Allocation(10, "activations"))
    trace.free(early)
    trace.free(made)
    assert trace.replay(PlainAllocator(), steps=2).allocated_bytes == [60, 70, 10, 0, 10, 10, 0]


def test_without_a_step_nothing_is_repeated() -> None:
    trace = Trace()
    trace.begin("load")
    trace.free(trace.allocate(Allocation(7, "weights")))
    replay = trace.replay(PlainAllocator(), steps=5)
    assert replay.allocated_bytes == [7, 0]
    assert [(m.phase, m.allocated_bytes) for m in replay.occurrences] == [("load", 7)]


def test_occurrences_of_a_phase_are_kept_apart_and_the_fullest_counts() -> None:
    trace = Trace()
    for size in (30, 80, 50):
        trace.begin("forward")
        number = trace.allocate(Allocation(size, "activations"))
        trace.begin("backward")
        trace.free(number)
    replay = trace.replay(PlainAllocator())
    forwards = [m for m in replay.occurrences if m.phase == "forward"]
    assert [m.allocated_bytes for m in forwards] == [30, 80, 50]
    assert [len(m.alive) for m in forwards] == [1, 1, 1]
    assert {m.phase: m.allocated_bytes for m in replay.peaks} == {"forward": 80, "backward": 0}


def test_what_was_reserved_counts_even_where_another_occurrence_is_fuller() -> None:
    moments = [PhasePeak("forward", 10, 90), PhasePeak("forward", 50, 60), PhasePeak("loss", 5, 60)]
    best = peak_of_each_phase(moments)
    assert [(m.phase, m.allocated_bytes, m.reserved_bytes) for m in best] == [("forward", 50, 90), ("loss", 5, 60)]
    assert (moments[1].allocated_bytes, moments[1].reserved_bytes) == (50, 60), "its arguments are left alone"


def test_streams_of_allocations_reach_the_allocator() -> None:
    trace = Trace()
    trace.begin("forward")
    for stream in (0, 1):
        trace.free(trace.allocate(Allocation(20 * MIB, "communication", stream=stream)))
    assert trace.replay(CachingAllocator()).peak_reserved_bytes == 40 * MIB
    trace.allocations[1].stream = 0
    assert trace.replay(CachingAllocator()).peak_reserved_bytes == 20 * MIB


def test_what_is_made_once_is_kept_where_it_is() -> None:
    """A workspace of 1 MiB that the first step cuts out of a block of 40 stays there: the second needs another."""
    trace = Trace()
    trace.begin("forward")
    trace.step_start = 0
    trace.free(trace.allocate(Allocation(40 * MIB, "activations")))
    trace.allocate(Allocation(2 * MIB, "workspace", once=True))
    assert [trace.replay(steps=steps).peak_reserved_bytes // MIB for steps in (1, 2, 3)] == [40, 80, 80]
    assert trace.replay().peak_allocated_bytes == 42 * MIB
    trace.allocations[1].once = False
    assert trace.replay().peak_reserved_bytes == 80 * MIB, "taken anew after 40 were asked for"


def random_trace(seed: int) -> Trace:
    """Allocations of all sizes and a few phases, over and over; some outlive the step."""
    draw, trace = random.Random(seed), Trace()
    alive: list[int] = []
    for turn, phase in enumerate(("load", "init", "forward", "loss", "backward", "forward", "backward", "optimizer")):
        if turn == 2:
            trace.step_start = len(trace.events)
        trace.begin(phase)  # type: ignore[arg-type]
        for _ in range(60):
            if alive and draw.random() < 0.45:
                trace.free(alive.pop(draw.randrange(len(alive))))
            else:
                size = draw.choice((1, 700, MIB // 3, 3 * MIB, 11 * MIB)) + draw.randrange(4096)
                kind = Allocation(
                    size, draw.choice(COMPONENTS), draw.choice(("", "mlp")), f"layers.{draw.randrange(3)}.mlp"
                )
                alive.append(trace.allocate(kind))
    return trace


@pytest.mark.parametrize("seed", range(5))
def test_ledgers_add_up_to_what_was_allocated_and_reserved(seed: int) -> None:
    replay = random_trace(seed).replay(steps=2)
    ledger = ledger_of(replay.peaks, "simulation", context_bytes=5 * MIB)
    assert [phase for phase, _ in ledger.moments()] == sorted({m.phase for m in replay.peaks}, key=PHASES.index)
    for moment in replay.peaks:
        assert sum(rounded(a.bytes) for a in moment.alive) <= moment.allocated_bytes
        assert ledger.allocated_bytes(moment.phase) == moment.allocated_bytes
        by_component = ledger.by_component(moment.phase)
        assert by_component["cuda context"] == 5 * MIB
        assert by_component.get("allocator slack", 0) == moment.reserved_bytes - moment.allocated_bytes
    assert ledger.peak_allocated_bytes() == replay.peak_allocated_bytes
    assert ledger.peak_reserved_bytes() == replay.peak_reserved_bytes
    assert ledger.peak_bytes() == replay.peak_reserved_bytes + 5 * MIB


@pytest.mark.parametrize("seed", range(3))
def test_with_exact_bytes_each_component_is_what_was_alive(seed: int) -> None:
    replay = random_trace(seed).replay(PlainAllocator(), steps=1)
    ledger = ledger_of(replay.peaks, "measurement", place="host")
    assert not ledger.moments("gpu")
    for moment in replay.peaks:
        found = ledger.by_component(moment.phase, place="host")
        for component in COMPONENTS:
            assert found.get(component, 0) == sum(a.bytes for a in moment.alive if a.component == component)


def test_events_are_alive_from_their_making_to_their_end() -> None:
    """By walking the events anew: at each moment exactly what had been made and not yet freed."""
    trace = random_trace(9)
    replay = trace.replay(PlainAllocator(), steps=1)
    for moment in replay.occurrences:
        seen = trace.events[: moment.event + 1]
        expected = [trace.allocations[e] for e in seen if e >= 0 and ~e not in seen]
        assert moment.alive == expected
        assert moment.allocated_bytes == sum(a.bytes for a in expected)


def test_largest_alive_counts_the_same_tensor_of_all_layers_as_one_kind() -> None:
    alive = [Allocation(10, "activations", "mlp", f"layers.{n}.mlp", "aten.mm") for n in range(7)]
    alive += [Allocation(60, "weights", "", "embed", "aten.empty"), Allocation(1, "workspace")]
    alive.append(Allocation(10, "activations", "mlp", "layers.0.attention", "aten.mm"))
    ranked = largest_alive(PhasePeak("forward", alive=alive), count=3)
    assert [(a.module, a.bytes, times) for a, times in ranked] == [
        ("layers.*.mlp", 10, 7),
        ("embed", 60, 1),
        ("layers.*.attention", 10, 1),
    ]
    everything = largest_alive(PhasePeak("forward", alive=alive))
    assert sum(a.bytes * times for a, times in everything) == sum(a.bytes for a in alive)


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_can_be_traced(phase: Phase) -> None:
    trace = Trace()
    trace.begin(phase)
    trace.allocate(Allocation(600, "weights"))
    assert ledger_of(trace.replay().peaks, "simulation").allocated_bytes(phase) == 1024


def test_a_captured_step_has_a_pool_of_its_own_where_gradients_stay() -> None:
    """Weights; a step of an activation, a workspace that is kept and a gradient; an update that copies and frees it."""
    trace = Trace()
    trace.begin("init")
    trace.allocate(Allocation(100 * MIB, "weights"))
    trace.step_start = len(trace.events)
    trace.begin("forward")
    kept = trace.allocate(Allocation(400 * MIB, "activations"))
    trace.allocate(Allocation(32 * MIB, "workspace", once=True))
    trace.begin("backward")
    gradient = trace.allocate(Allocation(60 * MIB, "gradients"))
    trace.free(kept)
    trace.begin("optimizer")
    copy = trace.allocate(Allocation(120 * MIB, "gradients", "float32"))
    trace.free(gradient)
    trace.free(copy)
    plain, captured = trace.replay(), trace.replay(captured=True)
    assert plain.peak_reserved_bytes == (100 + 400 + 32 + 60) * MIB, "the copy is where the activation was"
    assert captured.peak_reserved_bytes == plain.peak_reserved_bytes + 120 * MIB
    whole = trace.replay(captured=True, update_captured=True)
    assert whole.peak_reserved_bytes == plain.peak_reserved_bytes, "so it is in a graph of the whole step"
    assert captured.peak_allocated_bytes == plain.peak_allocated_bytes
    update = captured.occurrences[-1]
    assert update.phase == "optimizer"
    assert update.allocated_bytes == (100 + 32 + 60 + 120) * MIB
    assert sum(each.bytes for each in update.alive) == update.allocated_bytes


def trace_of_carried_steps(*, last_activation: int = 40) -> Trace:
    """Weights, and three steps: an activation, then what the last one left is freed, and a gradient is left."""
    trace = Trace()
    trace.begin("init")
    trace.allocate(Allocation(100, "weights"))
    left = None
    for step in range(3):
        if step:
            trace.previous_start, trace.step_start = trace.step_start, len(trace.events)
        trace.begin("forward")
        kept = trace.allocate(Allocation(last_activation if step == 2 else 40, "activations"))
        if left is not None:
            trace.free(left)
        trace.begin("backward")
        left = trace.allocate(Allocation(50, "gradients"))
        trace.free(kept)
    return trace


def test_a_step_that_frees_what_the_last_one_left_is_repeated() -> None:
    replay = trace_of_carried_steps().replay(PlainAllocator())
    one = [190, 140, 190, 150]
    assert replay.allocated_bytes == [100, 140, 190, 150] + 2 * one + (CARRIED_STEPS - 1) * one
    last = replay.occurrences[-1]
    assert (last.phase, last.allocated_bytes) == ("backward", 190)
    assert sum(each.bytes for each in last.alive) == 190
    once = trace_of_carried_steps().replay(PlainAllocator(), steps=1)
    assert once.allocated_bytes == [100, 140, 190, 150] + 2 * one


def test_steps_that_differ_are_not_repeated() -> None:
    replay = trace_of_carried_steps(last_activation=41).replay(PlainAllocator())
    assert replay.allocated_bytes == [100, 140, 190, 150, 190, 140, 190, 150, 191, 141, 191, 150]
