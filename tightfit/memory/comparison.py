"""A predicted and a measured ledger, compared line by line.

Every phase that both ledgers have is compared by component, at its peak, on the rank that needs most. A measurement on
the CPU is in host memory and has tensors only: from a prediction for a GPU, kernels' workspaces are then left out, and
reserved memory is not compared.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tightfit.bounded_files import LARGEST_RECORD_BYTES, read_json
from tightfit.errors import UserError
from tightfit.memory.ledger import NOT_ALLOCATED, PHASES, Component, Ledger, Phase, Place

HOLDERS = ("ledger.json", "plan.json")
"""Files of a directory that hold a ledger, the measured one first."""


@dataclass(frozen=True)
class Pair:
    """Predicted and measured bytes of one component at the peak of one phase; component None: of all together."""

    phase: Phase
    component: Component | None
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float | None:
        """(predicted − measured) / measured; None where nothing was measured."""
        return self.predicted_bytes / self.measured_bytes - 1 if self.measured_bytes else None

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "error": self.error}


@dataclass(frozen=True)
class Comparison:
    """Every component of every phase that both ledgers have, and the peaks of the whole run.

    `allocated` and `reserved` name the phase of the measured peak. `reserved` is None unless both ledgers are a GPU's.
    """

    pairs: tuple[Pair, ...]
    allocated: Pair
    reserved: Pair | None
    place: Place

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "place": self.place,
            "allocated": self.allocated.to_json(),
            "reserved": None if self.reserved is None else self.reserved.to_json(),
            "lines": [pair.to_json() for pair in self.pairs],
        }


def compare(predicted: Ledger, measured: Ledger) -> Comparison:
    """Compare the two, each in its own place (GPU or host), on the rank that needs most."""
    place, source = _place(measured), _place(predicted)
    if place != source:
        predicted, measured = _tensors_only(predicted), _tensors_only(measured)
    common = [phase for phase in PHASES if _ranks(predicted, phase, source) and _ranks(measured, phase, place)]
    pairs = [pair for phase in common for pair in _phase(predicted, measured, phase, source, place)]
    fullest = measured.fullest(place)[0]
    allocated = Pair(fullest, None, predicted.peak_allocated_bytes(source), measured.peak_allocated_bytes(place))
    reserved = Pair(fullest, None, predicted.peak_reserved_bytes(source), measured.peak_reserved_bytes(place))
    return Comparison(tuple(pairs), allocated, reserved if place == source == "gpu" else None, place)


def _tensors_only(ledger: Ledger) -> Ledger:
    """The lines of components that ledgers of a GPU and of a host have in common."""
    kept = (line for line in ledger.lines if line.component not in (*NOT_ALLOCATED, "workspace"))
    return Ledger(ledger.source, tuple(kept))


def read_ledger(path: Path) -> Ledger:
    """The ledger in a file (a ledger or a plan) or in a run's directory."""
    file = next((path / name for name in HOLDERS if (path / name).is_file()), None) if path.is_dir() else path
    if file is None:
        raise UserError(f"{path} holds no {' or '.join(HOLDERS)}; make one with `tightfit measure {path}`")
    data = read_json(file, LARGEST_RECORD_BYTES, "a ledger", remedy="give a plan, a ledger or a run's directory")
    inner = data.get("ledger") if isinstance(data, dict) else None
    found = Ledger.from_json(inner if isinstance(inner, dict) else data, str(file))
    if not found.lines:
        raise UserError(f"the ledger of {file} is empty; make another with `tightfit measure` or `tightfit plan`")
    return found


def _place(ledger: Ledger) -> Place:
    return "gpu" if ledger.moments("gpu") else "host"


def _phase(predicted: Ledger, measured: Ledger, phase: Phase, source: Place, place: Place) -> list[Pair]:
    expected = predicted.by_component(phase, _fullest_rank(predicted, phase, source), source)
    actual = measured.by_component(phase, _fullest_rank(measured, phase, place), place)
    components = [name for name in {**expected, **actual} if name not in NOT_ALLOCATED]
    pairs = [Pair(phase, name, expected.get(name, 0), actual.get(name, 0)) for name in components]
    pairs.sort(key=lambda pair: -max(pair.predicted_bytes, pair.measured_bytes))
    whole = Pair(phase, None, sum(p.predicted_bytes for p in pairs), sum(p.measured_bytes for p in pairs))
    return [*pairs, whole]


def _ranks(ledger: Ledger, phase: Phase, place: Place) -> list[int]:
    return [rank for found, rank in ledger.moments(place) if found == phase]


def _fullest_rank(ledger: Ledger, phase: Phase, place: Place) -> int:
    return max(_ranks(ledger, phase, place), key=lambda rank: ledger.allocated_bytes(phase, rank, place))
