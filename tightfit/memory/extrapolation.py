"""The phase peaks of a deep model from traces of two shallow ones.

Identical layers keep the same bytes, so the bytes alive at a given point of a step (the end of forward, the start or
the end of backward, the update) grow linearly with the layers. A period is the repeating pattern of layers (such as
windowed and full attention in turn); two traces that differ by one period give that growth per component. Backward is
split at every period: memory changes along it by the same amount per period, so its peak is at one of its ends, and
both are extrapolated. Exact for tensors. Rounding to blocks is assumed to stay the same share, and reserved minus peak
memory to stay constant, as it comes from buffers that every layer reuses.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from tightfit.errors import UserError
from tightfit.memory.ledger import Component
from tightfit.memory.trace import Allocation, PhasePeak

SHALLOW_PERIODS = 3


def depths(layers: int, period: int) -> tuple[int, int]:
    """Two shallow numbers of layers, one period apart, to which adding whole periods gives `layers`."""
    shallow = SHALLOW_PERIODS * period + layers % period
    return shallow, shallow + period


def extrapolated(few: Sequence[PhasePeak], more: Sequence[PhasePeak], periods: int) -> list[PhasePeak]:
    """The peaks `periods` periods of layers beyond those of `more`, which has one period more than `few`."""
    if not few or not more:
        return []
    peaks = [_beyond(a, b, periods) for a, b in _paired(few, more)]
    growth = _peak(peaks) - _peak(more)
    reserved = max(peak.reserved_bytes for peak in more)
    for peak in peaks:
        peak.reserved_bytes = max(peak.allocated_bytes, reserved + growth)
    return peaks


def _paired(few: Sequence[PhasePeak], more: Sequence[PhasePeak]) -> Iterator[tuple[PhasePeak, PhasePeak]]:
    """Pairs of peaks at the same point of a step.

    Backward has a section before the layers and one per period, so `more` has one section more. Its first sections are
    paired from the start of backward and its last ones from the end.
    """
    runs = [[(phase, list(run)) for phase, run in groupby(peaks, key=lambda m: m.phase)] for peaks in (few, more)]
    if [phase for phase, _ in runs[0]] != [phase for phase, _ in runs[1]]:
        raise UserError("two depths of the model went through different phases; simulate it in full")
    for (_, short), (_, long) in zip(*runs, strict=True):
        if len(long) == len(short):
            yield from zip(short, long, strict=True)
        else:
            yield from zip(short[:-1], long, strict=False)
            yield from zip(short[-2:], long[-2:], strict=True)


def _peak(peaks: Sequence[PhasePeak]) -> int:
    return max(peak.allocated_bytes for peak in peaks)


def _beyond(few: PhasePeak, more: PhasePeak, periods: int) -> PhasePeak:
    """The peak `periods` periods beyond `more`: each kind of tensor grows by the two peaks' difference per period.

    Where the two peaks are at different moments, some kinds shrink and may become negative: then only the sum is
    extrapolated, and distributed over the other kinds in proportion.
    """
    held, wider = _by_kind(few), _by_kind(more)
    grown = {kind: wider[kind] + (wider[kind] - held[kind]) * periods for kind in held | wider}
    total, left = max(0, sum(grown.values())), {kind: count for kind, count in grown.items() if count > 0}
    share = total / (sum(left.values()) or 1)
    alive = [Allocation(round(share * count), *kind) for kind, count in left.items()]
    rounding = more.allocated_bytes / (wider.total() or 1)
    return PhasePeak(more.phase, round(total * rounding), event=more.event, alive=alive)


def _by_kind(peak: PhasePeak) -> Counter[tuple[Component, str]]:
    held: Counter[tuple[Component, str]] = Counter()
    for allocation in peak.alive:
        held[allocation.component, allocation.detail] += allocation.bytes
    return held
