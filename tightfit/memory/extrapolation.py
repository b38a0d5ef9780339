"""Identical layers are traced once: a deep model's moments from those of two shallow ones.

Every layer keeps the same, so what is alive at a given point of a step (the end of forward, the start or the end of
backward, the update) grows by the same bytes with every layer. Two traces that differ by one period of layers give that
growth for each component; backward is cut after the last layers, so that its fullest moment is known at both ends and
neither can hide the other. Exact for tensors; rounding to blocks is taken to stay the same share of them, and what the
allocator reserves beyond the peak to stay the same, as it comes from buffers that every layer uses anew.
"""

from collections import Counter
from collections.abc import Sequence

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
    if [moment.phase for moment in few] != [moment.phase for moment in more]:
        raise UserError("two depths of the model went through different phases; simulate it in full")
    made = [_beyond(a, b, periods) for a, b in zip(few, more, strict=True)]
    growth = _peak(made) - _peak(more)
    for moment, shallow in zip(made, more, strict=True):
        moment.reserved_bytes = max(moment.allocated_bytes, shallow.reserved_bytes + growth)
    return made


def _peak(moments: Sequence[Moment]) -> int:
    return max(moment.allocated_bytes for moment in moments)


def _beyond(few: Moment, more: Moment, periods: int) -> Moment:
    """Each kind of tensor grows by what one period adds; rounding to blocks stays the same share."""
    held, wider = _by_kind(few), _by_kind(more)
    grown = {kind: wider[kind] + (wider[kind] - held[kind]) * periods for kind in wider}
    alive = [Allocation(count, *kind) for kind, count in grown.items() if count > 0]
    rounding = more.allocated_bytes / wider.total()
    return Moment(more.phase, round(sum(a.bytes for a in alive) * rounding), event=more.event, alive=alive)


def _by_kind(moment: Moment) -> Counter[tuple[Component, str]]:
    held: Counter[tuple[Component, str]] = Counter()
    for allocation in moment.alive:
        held[allocation.component, allocation.detail] += allocation.bytes
    return held
