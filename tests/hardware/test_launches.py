"""What the host needs to launch a layer is found again in the calibration."""

import pytest

from benchmarks.reports.launches import HostRows
from tests.hardware.calibration import rows
from tightfit.hardware.launches import (
    CHUNK_WEIGHTS,
    FURTHER_CHUNK_MS,
    LAYER,
    PIECE_LAUNCH_MS,
    REST,
    UPDATE_MS,
    UPDATE_REST_MS,
    USUAL_MATRICES,
    Launch,
)
from tightfit.levers.policy.updates import FACTORED_CHUNK_ELEMENTS

DEEP = 8
MEASURED = HostRows("ed2cee4526", "557961628a").ms


def per_layer(phase: str, levers: str) -> float:
    """Of the deeper model's phase, without what a plain step has besides its layers, one layer's part."""
    name = f"{phase}, bf16{' ' + levers if levers else ''}"
    whole = MEASURED[f"the rest of {name}"] + DEEP * MEASURED[f"a layer's {name}"]
    return (whole - MEASURED[f"the rest of {phase}, bf16"]) / DEEP


@pytest.mark.parametrize(("levers", "launch"), LAYER.items())
def test_a_layers_launches_are_measured(levers: str, launch: Launch) -> None:
    found = [per_layer(phase, levers) for phase in ("forward", "backward")]
    assert found == pytest.approx(list(launch), abs=0.002)


def test_the_rest_and_the_updates_are_measured() -> None:
    assert [MEASURED[f"the rest of {phase}, bf16"] for phase in ("forward", "backward")] == pytest.approx(
        list(REST), abs=0.001
    )
    assert MEASURED["the rest of optimizer, bf16"] == pytest.approx(UPDATE_REST_MS, abs=0.001)
    for levers, milliseconds in UPDATE_MS.items():
        assert per_layer("optimizer", levers) == pytest.approx(milliseconds, abs=0.002)
    assert per_layer("optimizer", "offload=optimizer") / USUAL_MATRICES == pytest.approx(PIECE_LAUNCH_MS, abs=0.001)
    (chunk,) = (row.ms for row in rows("host") if row.case == "factored update, each further chunk")
    assert chunk == pytest.approx(FURTHER_CHUNK_MS, abs=1e-4)


def test_tiles_are_on_a_line() -> None:
    """Four tiles between two and eight, as the planner takes them."""
    few, some, many = (sum(LAYER[f"tiles={count}"]) for count in (2, 4, 8))
    assert few + (many - few) / 3 == pytest.approx(some, rel=0.1)


def test_chunks_are_the_optimizers() -> None:
    assert CHUNK_WEIGHTS == FACTORED_CHUNK_ELEMENTS
