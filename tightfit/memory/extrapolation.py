"""Identical layers are traced once: a deep model's moments from those of two shallow ones.

Every layer keeps the same, so what is alive at a given point of a step (the end of forward, the start or the end of
backward, the update) grows by the same bytes with every layer. Two traces that differ by one period of layers give that
growth for each component. Backward is cut at every period: memory falls or rises along it by the same step, so it is
fullest at one of its ends, and both are followed. Exact for tensors; rounding to blocks is taken to stay the same share
of them, and what the allocator reserves beyond the peak to stay the same, as it comes from buffers that every layer
uses anew.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from tightfit.errors import UserError
from tightfit.memory.ledger import Component
from tightfit.memory.trace import Allocation, Moment

SHALLOW_PERIODS = 3


def depths(layers: int, period: int) -> tuple[int, int]:
    """Two shallow depths, one period apart, that go on to `layers` in whole periods."""
    shallow = SHALLOW_PERIODS * period + layers % period
    return shallow, shallow + period


def extrapolated(few: Sequence[Moment], more: Sequence[Moment], periods: int) -> list[Moment]:
    """The moments `periods` periods of layers beyond those of `more`, which has one period more than `few`."""
    if not few or not more:
        return []
    made = [_beyond(a, b, periods) for a, b in _paired(few, more)]
    growth = _peak(made) - _peak(more)
    reserved = max(moment.reserved_bytes for moment in more)
    for moment in made:
        moment.reserved_bytes = max(moment.allocated_bytes, reserved + growth)
    return made


def _paired(few: Sequence[Moment], more: Sequence[Moment]) -> Iterator[tuple[Moment, Moment]]:
    """Moments of the two that are at the same point of a step, counted from its start or from its end.

    Backward has a stretch before the layers and one per period, so `more` has one more of them. Its first ones are
    met from the start of backward and its last ones from the end; the one between is met from both.
    """
    runs = [[(phase, list(run)) for phase, run in groupby(moments, key=lambda m: m.phase)] for moments in (few, more)]
    if [phase for phase, _ in runs[0]] != [phase for phase, _ in runs[1]]:
        raise UserError("two depths of the model went through different phases; simulate it in full")
    for (_, short), (_, long) in zip(*runs, strict=True):
        if len(long) == len(short):
            yield from zip(short, long, strict=True)
        else:
            yield from zip(short[:-1], long, strict=False)
            yield from zip(short[-2:], long[-2:], strict=True)


def _peak(moments: Sequence[Moment]) -> int:
    return max(moment.allocated_bytes for moment in moments)


def _beyond(few: Moment, more: Moment, periods: int) -> Moment:
    """Each kind of tensor grows by what one period adds; rounding to blocks stays the same share."""
    held, wider = _by_kind(few), _by_kind(more)
    grown = {kind: wider[kind] + (wider[kind] - held[kind]) * periods for kind in wider}
    alive = [Allocation(count, *kind) for kind, count in grown.items() if count > 0]
    rounding = more.allocated_bytes / (wider.total() or 1)
    return Moment(more.phase, round(sum(a.bytes for a in alive) * rounding), event=more.event, alive=alive)


def _by_kind(moment: Moment) -> Counter[tuple[Component, str]]:
    held: Counter[tuple[Component, str]] = Counter()
    for allocation in moment.alive:
        held[allocation.component, allocation.detail] += allocation.bytes
    return held
