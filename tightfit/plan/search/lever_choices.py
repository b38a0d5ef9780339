"""Lever choices: the sets of levers that a search tries, and which of two sets needs more memory.

The values tried per lever are in jobs/lever_table.py. Left out because another value is never worse: the plain loss
(slower and larger); a pin brings it back. Of the levers that some layouts refuse (jobs/rules), only those that run
everywhere are searched.
"""

from collections.abc import Mapping
from functools import cached_property, lru_cache
from itertools import product
from operator import attrgetter, le
from typing import Any

from tightfit.jobs.lever_table import LEVER_TABLE, Wanted
from tightfit.jobs.levers import Levers
from tightfit.jobs.rules.refusals import refused_levers

NO_LEVERS = Levers()
TILED_LENGTH = 16384
"""From this sequence length on, tiles save more bytes of activations than their float32 sums of gradients take."""
SEARCHED = tuple((row, row.values) for row in LEVER_TABLE if row.values is not None)
STATES_LEVER = "offload"
"""The lever that says which states are on the host."""
HostUse = tuple[str, str, bool]
"""Use of host memory by a set of levers: which states, in which format, and whether checkpoints."""


def lever_sets(wanted: Wanted, pinned: Mapping[str, Any]) -> list[Levers]:
    """Every set of levers that does not contradict itself, the simplest first and the strongest last.

    Unless pinned, `offload_checkpoints` is only combined with checkpointing every layer, if any set has that.
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
    """Whether every lever of `levers` is at most as strong as in `other`, so that `levers` needs at least as much
    memory."""
    return all(map(le, strengths(levers), strengths(other)))


@lru_cache(maxsize=4096)
def without_gains(levers: Levers) -> Levers:
    """`levers` without those that are searched for memory alone; `levers` themselves where others depend on these."""
    for_memory = (row.name for row, _ in SEARCHED if row.for_memory_alone(levers))
    plainer = levers.model_copy(update={name: Levers.model_fields[name].default for name in for_memory})
    return levers if refused_levers(plainer) else plainer


states_on_host = attrgetter(STATES_LEVER, "optimizer_states")
"""Which states a set of levers keeps on the host, and in which format."""


class LeverSets(tuple[Levers, ...]):
    """Sets of levers that a layout can have, the simplest first and the strongest last."""

    @cached_property
    def groups(self) -> dict[HostUse, list[Levers]]:
        """Sets by what they keep on the host. If the last of a group, the strongest, does not fit on card and host,
        none of the group does."""
        found: dict[HostUse, list[Levers]] = {}
        for levers in self:
            found.setdefault((*states_on_host(levers), levers.offload_checkpoints), []).append(levers)
        return found

    def strongest(self, *, any_host: bool) -> list[Levers]:
        """Sets of which one fits if any set does: the strongest of each group, or of all if the host does not limit."""
        return list(self[-1:]) if any_host else [group[-1] for group in reversed(self.groups.values())]
