"""The constants of hardware/launches.py from a calibration's rows: `python -m benchmarks.reports.launches COMMIT`.

Prints them as they stand there. A layer's launches are an eighth of the deeper model's phase, without what a plain step
has besides its layers. A norm's and a bias's are those that families have beyond a Llama layer: Qwen3's two norms of
heads, Qwen2's three biases; an update's inside backward, a ninth of what that adds to a layer of nine tensors.
"""

import csv
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.rows import RESULTS
from tightfit.hardware.launches import LAYER, UPDATE_MS, USUAL_TENSORS

DEEP = 8
MATRICES = 7
PASSES = ("forward", "backward")


class HostRows:
    """What one calibration measured of its host."""

    def __init__(self, commit: str, path: Path = RESULTS / "calibration.csv") -> None:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["commit"] == commit and row["kind"] == "host"]
        self.ms = {row["case"]: float(row["ms"]) for row in rows}

    def layer(self, phase: str, name: str, plain: str = "bf16") -> float:
        """One layer's part of a phase of steps called `name`."""
        whole = self.ms[f"the rest of {phase}, {name}"] + DEEP * self.ms[f"a layer's {phase}, {name}"]
        return (whole - self.ms[f"the rest of {phase}, {plain}"]) / DEEP

    def beyond_llama(self, family: str, count: int) -> tuple[float, float]:
        """Forward and backward of one of `count` operations that a family's layer has more than Llama's."""
        of_family, of_llama = ([self.layer(phase, name, "llama") for phase in PASSES] for name in (family, "llama"))
        forward, backward = ((more - base) / count for more, base in zip(of_family, of_llama, strict=True))
        return forward, backward


def constants(rows: HostRows) -> list[str]:
    """Lines of launches.py."""

    def named(levers: str) -> str:
        return f"bf16 {levers}" if levers else "bf16"

    def pair(values: Iterable[float]) -> str:
        return f"Launch({', '.join(f'{value:.3f}' for value in values)})"

    rest = [rows.ms[f"the rest of {phase}, bf16"] for phase in PASSES]
    layers = [f'    "{levers}": {pair([rows.layer(phase, named(levers)) for phase in PASSES])},' for levers in LAYER]
    updates = [f'"{levers}": {rows.layer("optimizer", named(levers)):.3f}' for levers in UPDATE_MS]
    inside = rows.layer("backward", named("update_in_backward=true")) - rows.layer("backward", "bf16")
    return [
        f"REST = {pair(rest)}",
        "LAYER = {",
        *layers,
        "}",
        f"NORM, BIAS = {pair(rows.beyond_llama('qwen3', 2))}, {pair(rows.beyond_llama('qwen2', 3))}",
        f"TENSOR_UPDATE_MS = {inside / USUAL_TENSORS:.3f}",
        f"UPDATE_REST_MS = {rows.ms['the rest of optimizer, bf16']:.3f}",
        f"UPDATE_MS = {{{', '.join(updates)}}}",
        f"PIECE_LAUNCH_MS = {rows.layer('optimizer', named('offload=optimizer')) / MATRICES:.3f}",
    ]


def main() -> None:
    """Print the constants of the calibration at a commit."""
    print("\n".join(constants(HostRows(sys.argv[1]))))


if __name__ == "__main__":
    main()
