"""Constants of launches are read off a calibration as launches.py has them."""

from itertools import product
from pathlib import Path

from benchmarks.calibrate_families import FAMILIES
from benchmarks.reports.launches import FAMILY_TENSORS, UPDATED_AT, HostRows, constants
from tightfit.hardware.launches import (
    BIAS,
    EXPERTS,
    LATE_UPDATE_MS,
    LAYER,
    MATRIX_UPDATE_MS,
    NORM,
    PIECE_LAUNCH_MS,
    REST,
    ROPE_AND_GATE,
    UPDATE_MS,
    UPDATE_REST_MS,
    VECTOR_UPDATE_MS,
    Launch,
)
from tightfit.models.resolve import resolve_spec
from tightfit.plan.seconds.launches import layer_tensors, layer_vectors


def test_stored_constants_are_found_again() -> None:
    """Of the calibrations that they were set from."""
    said = constants(HostRows("ed2cee4526", "557961628a"), HostRows(UPDATED_AT))
    layers = [f'    "{name}": {told(launch)},' for name, launch in LAYER.items()]
    assert said == [
        f"REST = {told(REST)}",
        "LAYER = {",
        *layers,
        "}",
        f"NORM, BIAS = {told(NORM)}, {told(BIAS)}",
        f"EXPERTS, ROPE_AND_GATE = {told(EXPERTS)}, {told(ROPE_AND_GATE)}",
        "MATRIX_UPDATE_MS, VECTOR_UPDATE_MS, LATE_UPDATE_MS = "
        f"{MATRIX_UPDATE_MS:.3f}, {VECTOR_UPDATE_MS:.3f}, {LATE_UPDATE_MS:.3f}",
        f"UPDATE_REST_MS = {UPDATE_REST_MS}",
        "UPDATE_MS = {" + ", ".join(f'"{name}": {ms:.3f}' for name, ms in UPDATE_MS.items()) + "}",
        f"PIECE_LAUNCH_MS = {PIECE_LAUNCH_MS}",
    ]


def test_families_layers_have_the_tensors_that_are_planned() -> None:
    for family, (matrices, vectors) in FAMILY_TENSORS.items():
        spec = resolve_spec(FAMILIES[family])
        assert (matrices, vectors) == (layer_tensors(spec) - layer_vectors(spec), layer_vectors(spec))


def told(launch: Launch) -> str:
    return f"Launch({launch.forward_ms:.3f}, {launch.backward_ms:.3f})"


def test_norms_and_biases_are_what_families_have_more(tmp_path: Path) -> None:
    """Two norms of 0.1 and 0.2 ms, three biases of 0.01 and 0.02."""
    layers = {"llama": (1.0, 2.0), "qwen3": (1.2, 2.4), "qwen2": (1.03, 2.06)}
    lines = ["commit,kind,case,ms"]
    for (family, times), (at, phase) in product(layers.items(), enumerate(("forward", "backward"))):
        lines += [f'abc,host,"a layer\'s {phase}, {family}",{times[at]}', f'abc,host,"the rest of {phase}, {family}",1']
    path = tmp_path / "calibration.csv"
    path.write_text("\n".join(lines), encoding="utf-8")
    rows = HostRows("abc", path=path)
    assert [round(ms, 6) for ms in rows.beyond_llama("qwen3", 2)] == [0.1, 0.2]
    assert [round(ms, 6) for ms in rows.beyond_llama("qwen2", 3)] == [0.01, 0.02]
