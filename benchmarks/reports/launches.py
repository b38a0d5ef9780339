"""The constants of hardware/launches.py from calibrations' rows: `python -m benchmarks.reports.launches COMMIT…`.

Prints them as they stand there. What several calibrations measured is averaged, as hosts vary. A layer's launches are
an eighth of the deeper model's phase, without what a plain step has besides its layers. A norm's and a bias's are those
that families have beyond a Llama layer: Qwen3's two norms of heads, Qwen2's three biases; experts' what Mixtral's layer
has, and a rope's and a gate's what GPT-2's lacks beside its six biases.

Updates inside backward have a calibration of their own (`UPDATED_AT`), on a host that was faster: its times are
multiplied by what a plain layer took the others, divided by what it took this one. Families' layers differ in how many
matrices and vectors they update; single ones vary by a third, so the mean over all of them counts.
"""

import csv
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.rows import RESULTS
from tightfit.hardware.launches import LAYER, UPDATE_MS

DEEP = 8
MATRICES = 7
GPT2_BIASES = 6
PASSES = ("forward", "backward")
UPDATED = "update_in_backward=true"
UPDATED_AT = "0390033fe7"
FAMILY_TENSORS = {
    "llama": (7, 2),
    "qwen2": (7, 5),
    "qwen3": (7, 4),
    "gemma2": (7, 4),
    "gemma3": (7, 6),
    "gpt2": (6, 10),
    "mixtral": (7, 2),
}
"""Matrices and vectors of a layer, as planned."""


class HostRows:
    """What calibrations measured of their hosts, on average."""

    def __init__(self, *commits: str, path: Path = RESULTS / "calibration.csv") -> None:
        found: dict[str, list[float]] = {}
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if row["commit"] in commits and row["kind"] == "host":
                    found.setdefault(row["case"], []).append(float(row["ms"]))
        self.ms = {case: statistics.mean(times) for case, times in found.items()}

    def layer(self, phase: str, name: str, plain: str = "bf16") -> float:
        """One layer's part of a phase of steps called `name`."""
        whole = self.ms[f"the rest of {phase}, {name}"] + DEEP * self.ms[f"a layer's {phase}, {name}"]
        return (whole - self.ms[f"the rest of {phase}, {plain}"]) / DEEP

    def plain_layer(self, name: str) -> float:
        """Forward, backward and update of one layer of plain steps called `name`."""
        return sum(self.layer(phase, name, name) for phase in (*PASSES, "optimizer"))

    def updates(self) -> Iterator[tuple[float, float, float]]:
        """Of updating inside backward, as shares of a plain Llama layer: one matrix, one vector, and the rest of the
        phase after it."""
        for family, (matrices, vectors) in FAMILY_TENSORS.items():
            inside, llama_ms = f"{family} {UPDATED}", self.plain_layer("llama")
            more_ms = self.layer("backward", inside, family) - self.layer("backward", family, family)
            late_ms, rest_ms = (self.ms[f"{part} optimizer, {inside}"] for part in ("a layer's", "the rest of"))
            yield more_ms / matrices / llama_ms, late_ms / vectors / llama_ms, rest_ms / llama_ms

    def beyond_llama(self, family: str, count: int) -> tuple[float, float]:
        """Forward and backward of one of `count` operations that a family's layer has more than Llama's."""
        of_family, of_llama = ([self.layer(phase, name, "llama") for phase in PASSES] for name in (family, "llama"))
        forward, backward = ((more - base) / count for more, base in zip(of_family, of_llama, strict=True))
        return forward, backward


def constants(rows: HostRows, updated: HostRows) -> list[str]:
    """Lines of launches.py; updates inside backward from `updated`."""

    def named(levers: str) -> str:
        return f"bf16 {levers}" if levers else "bf16"

    def pair(values: Iterable[float]) -> str:
        return f"Launch({', '.join(f'{value:.3f}' for value in values)})"

    rest = [rows.ms[f"the rest of {phase}, bf16"] for phase in PASSES]
    layers = [f'    "{levers}": {pair([rows.layer(phase, named(levers)) for phase in PASSES])},' for levers in LAYER]
    updates = [f'"{levers}": {rows.layer("optimizer", named(levers)):.3f}' for levers in UPDATE_MS]
    bias = rows.beyond_llama("qwen2", 3)
    gpt2_biases = (GPT2_BIASES * each for each in bias)
    rope_and_gate = (more - beyond for more, beyond in zip(gpt2_biases, rows.beyond_llama("gpt2", 1), strict=True))
    layer_ms = rows.plain_layer("bf16")
    inside = [layer_ms * statistics.mean(shares) for shares in zip(*updated.updates(), strict=True)]
    return [
        f"REST = {pair(rest)}",
        "LAYER = {",
        *layers,
        "}",
        f"NORM, BIAS = {pair(rows.beyond_llama('qwen3', 2))}, {pair(bias)}",
        f"EXPERTS, ROPE_AND_GATE = {pair(rows.beyond_llama('mixtral', 1))}, {pair(rope_and_gate)}",
        f"MATRIX_UPDATE_MS, VECTOR_UPDATE_MS, LATE_UPDATE_MS = {', '.join(f'{ms:.3f}' for ms in inside)}",
        f"UPDATE_REST_MS = {rows.ms['the rest of optimizer, bf16']:.3f}",
        f"UPDATE_MS = {{{', '.join(updates)}}}",
        f"PIECE_LAUNCH_MS = {rows.layer('optimizer', named('offload=optimizer')) / MATRICES:.3f}",
    ]


def main() -> None:
    """Print the constants of the calibrations at some commits."""
    print("\n".join(constants(HostRows(*sys.argv[1:]), HostRows(UPDATED_AT))))


if __name__ == "__main__":
    main()
