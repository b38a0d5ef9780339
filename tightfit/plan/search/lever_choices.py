"""Lever choices: what a search tries of each lever, and which of two sets of levers needs more memory.

What is tried stands in the table of levers (jobs/lever_table.py). Left out because something else is never worse: the
plain loss (slower and larger); a pin brings it back. Of the levers that some layouts refuse (jobs/rules), only those
that run everywhere are searched.
"""

from collections.abc import Mapping
from functools import cached_property, lru_cache
from itertools import product
from operator import attrgetter, le
from typing import Any

from tightfit.jobs.lever_table import LEVER_TABLE, Wanted
from tightfit.jobs.levers import Levers
from tightfit.jobs.rules.refusals import refused_levers

TILED_LENGTH = 16384
"""From this length on tiles save more of activations than their float32 sums of weights' gradients take."""
SEARCHED = tuple((row, row.values) for row in LEVER_TABLE if row.values is not None)
STATES_LEVER = "offload"
"""The lever that says which states are on the host."""
HostUse = tuple[str, str, bool]
"""What levers keep on the host: which states, in which format, and whether checkpoints."""


def lever_sets(wanted: Wanted, pinned: Mapping[str, Any]) -> list[Levers]:
    """Every set of levers that does not contradict itself, the simplest first and the strongest last.

    Where checkpoints may go to the host and no pin says otherwise, those of every layer do.
    """
    values = {row.name: tried(wanted) for row, tried in SEARCHED}
    values |= {name: (value,) for name, value in pinned.items()}
    chosen = (dict(zip(values, each, strict=True)) for each in product(*values.values()))
    sets = [Levers.model_construct(**each) for each in chosen]
    kept = [each for each in sets if refused_levers(each) is None]
    if "offload_checkpoints" in pinned:
        return kept
    return [each for each in kept if not each.offload_checkpoints or each.checkpoint_every <= 1] or kept


@lru_cache(maxsize=4096)
def strengths(levers: Levers) -> tuple[float, ...]:
    """One number per lever, larger for less memory."""
    return tuple(row.strength(getattr(levers, row.name)) for row, _ in SEARCHED)


def weaker(levers: Levers, other: Levers) -> bool:
    """Whether `levers` pulls no lever harder than `other` does, and so needs no less memory."""
    return all(map(le, strengths(levers), strengths(other)))


@lru_cache(maxsize=4096)
def without_gains(levers: Levers) -> Levers:
    """The same without levers that are pulled for memory alone; `levers` themselves where others ask for these."""
    for_memory = (row.name for row, _ in SEARCHED if row.for_memory_alone(levers))
    plainer = levers.model_copy(update={name: Levers.model_fields[name].default for name in for_memory})
    return levers if refused_levers(plainer) else plainer


def decides_host(pinned: Mapping[str, Any]) -> bool:
    """Whether a pin says what states are on the host."""
    return STATES_LEVER in pinned


states_on_host = attrgetter(STATES_LEVER, "optimizer_states")
"""What states levers keep on the host, and in which format."""


class LeverSets(tuple[Levers, ...]):
    """Sets of levers that a layout can have, the simplest first and the strongest last."""

    @cached_property
    def groups(self) -> dict[HostUse, list[Levers]]:
        """Those that keep the same on the host. When the last of them, the strongest, does not fit, none of them does,
        be it the card or the host that is short."""
        found: dict[HostUse, list[Levers]] = {}
        for levers in self:
            found.setdefault((*states_on_host(levers), levers.offload_checkpoints), []).append(levers)
        return found

    def strongest(self, *, any_host: bool) -> list[Levers]:
        """If none of these fits, none does at all; a host of unknown size holds `any`."""
        return list(self[-1:]) if any_host else [group[-1] for group in reversed(self.groups.values())]
