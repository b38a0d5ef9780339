"""Constants of launches are read off a calibration as launches.py has them."""

from itertools import product
from pathlib import Path

from benchmarks.reports.launches import HostRows, constants
from tightfit.hardware.launches import LAYER, PIECE_LAUNCH_MS, REST, UPDATE_MS


def test_stored_constants_are_found_again() -> None:
    """Of the calibration that they were set from; families of another one stand in where it has none."""
    rows = HostRows("db97e30")
    rows.ms |= HostRows("e57fe20").ms
    rows.ms |= {case.replace("qwen2", "llama"): ms for case, ms in rows.ms.items() if "qwen2" in case}
    said = constants(rows)
    assert said[0] == f"REST = Launch({REST.forward_ms}, {REST.backward_ms})"
    layers = said[2 : 2 + len(LAYER)]
    assert layers == [f'    "{name}": Launch({fore:.3f}, {back:.3f}),' for name, (fore, back) in LAYER.items()]
    assert said[-2] == "UPDATE_MS = {" + ", ".join(f'"{name}": {ms}' for name, ms in UPDATE_MS.items()) + "}"
    assert said[-1] == f"PIECE_LAUNCH_MS = {PIECE_LAUNCH_MS}"


def test_norms_and_biases_are_what_families_have_more(tmp_path: Path) -> None:
    """Two norms of 0.1 and 0.2 ms, three biases of 0.01 and 0.02."""
    layers = {"llama": (1.0, 2.0), "qwen3": (1.2, 2.4), "qwen2": (1.03, 2.06)}
    lines = ["commit,kind,case,ms"]
    for (family, times), (at, phase) in product(layers.items(), enumerate(("forward", "backward"))):
        lines += [f'abc,host,"a layer\'s {phase}, {family}",{times[at]}', f'abc,host,"the rest of {phase}, {family}",1']
    path = tmp_path / "calibration.csv"
    path.write_text("\n".join(lines), encoding="utf-8")
    rows = HostRows("abc", path)
    assert [round(ms, 6) for ms in rows.beyond_llama("qwen3", 2)] == [0.1, 0.2]
    assert [round(ms, 6) for ms in rows.beyond_llama("qwen2", 3)] == [0.01, 0.02]
