"""Two ledgers side by side, line by line: what was said and what happened."""

from dataclasses import dataclass

from tightfit.memory.ledger import NOT_ALLOCATED, PHASES, Component, Ledger, Phase, Place


@dataclass(frozen=True)
class Pair:
    """Bytes of one component at the fullest moment of one phase, predicted and measured; no component is their sum."""

    phase: Phase
    component: Component | None
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float | None:
        """How far the prediction is off, as a share of what was measured; None where nothing was."""
        return self.predicted_bytes / self.measured_bytes - 1 if self.measured_bytes else None


@dataclass(frozen=True)
class Comparison:
    """Every component of every phase that both ledgers have, and the peaks of the whole run."""

    pairs: tuple[Pair, ...]
    allocated: Pair
    reserved: Pair


def compare(predicted: Ledger, measured: Ledger) -> Comparison:
    """Lay `predicted` beside `measured`, in the place that was measured, on the rank that needs most."""
    place: Place = "gpu" if measured.moments("gpu") else "host"
    source: Place = "gpu" if predicted.moments("gpu") else "host"
    common = [phase for phase in PHASES if _ranks(predicted, phase, source) and _ranks(measured, phase, place)]
    pairs = [pair for phase in common for pair in _phase(predicted, measured, phase, source, place)]
    said, found = predicted.fullest(source)[0], measured.fullest(place)[0]
    allocated = Pair(found, None, predicted.peak_allocated_bytes(source), measured.peak_allocated_bytes(place))
    reserved = Pair(said, None, predicted.peak_reserved_bytes(source), measured.peak_reserved_bytes(place))
    return Comparison(tuple(pairs), allocated, reserved)


def _phase(predicted: Ledger, measured: Ledger, phase: Phase, source: Place, place: Place) -> list[Pair]:
    said = predicted.by_component(phase, _fullest_rank(predicted, phase, source), source)
    found = measured.by_component(phase, _fullest_rank(measured, phase, place), place)
    components = [name for name in {**said, **found} if name not in NOT_ALLOCATED]
    pairs = [Pair(phase, name, said.get(name, 0), found.get(name, 0)) for name in components]
    pairs.sort(key=lambda pair: -max(pair.predicted_bytes, pair.measured_bytes))
    whole = Pair(phase, None, sum(p.predicted_bytes for p in pairs), sum(p.measured_bytes for p in pairs))
    return [*pairs, whole]


def _ranks(ledger: Ledger, phase: Phase, place: Place) -> list[int]:
    return [rank for found, rank in ledger.moments(place) if found == phase]


def _fullest_rank(ledger: Ledger, phase: Phase, place: Place) -> int:
    return max(_ranks(ledger, phase, place), key=lambda rank: ledger.allocated_bytes(phase, rank, place))
