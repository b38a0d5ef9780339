"""Spending: what a plan leaves free of the card buys time back, byte by byte.

The search tries levers in coarse steps, so a plan that fits may leave gigabytes unused. On one GPU they are spent here:
on a budget of activations in place of recomputing whole layers (memory/formulas/budget.py picks which), and on
optimizer states that need not travel (`offload_keep_bytes`). Each is the largest that still fits, found by halving;
both orders are tried and the faster plan is taken. What the user has decided is left alone.
"""

from collections.abc import Callable

from tightfit.errors import UserError
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.memory.formulas.training import peak
from tightfit.plan.cost import Costs
from tightfit.plan.search import COMFORT, Candidate
from tightfit.plan.space import Space

STEP_BYTES = 64 * 2**20
MOST_LAYERS = 64
"""Budgets of deeper models take seconds to work out."""
CHECKPOINTING = ("checkpoint_every", "num_checkpoints", "checkpoint_keep", "checkpoint_budget_bytes")
WORTH = 0.99
"""A plan must be so much of the other's time to be worth another lever."""


def spend(space: Space, candidate: Candidate) -> Candidate:
    """`candidate`, or a faster one with the same layout that fills the card better."""
    if space.machine.ranks > 1:
        return candidate
    spender = _Spender(space, candidate.layout)
    found = [candidate]
    for order in ((spender.on_activations, spender.on_states), (spender.on_states, spender.on_activations)):
        each = candidate
        for spent in order:
            better = spent(each)
            if better is not None and better.step_s < WORTH * each.step_s:
                each = better
        found.append(each)
    return min(found, key=lambda each: each.step_s)


class _Spender:
    """Tries levers on one layout."""

    def __init__(self, space: Space, layout: Layout) -> None:
        self.space, self.layout = space, layout
        self.frame = Costs(space.workload, space.machine).frame(layout)

    def on_activations(self, candidate: Candidate) -> Candidate | None:
        """Instead of recomputing layers, keep what the bytes allow."""
        levers, spec = candidate.levers, self.space.workload.spec
        if not levers.checkpoint_every or levers.offload == "weights" or spec.layers > MOST_LAYERS:
            return None
        if any(name in self.space.pins.levers for name in CHECKPOINTING) or levers.checkpoint_host_bytes is not None:
            return None
        bare = levers.model_copy(update={"checkpoint_every": 0, "checkpoint_keep": "nothing"})
        return self._largest(lambda size: bare.model_copy(update={"checkpoint_budget_bytes": size}))

    def on_states(self, candidate: Candidate) -> Candidate | None:
        """Of offloaded states, keep on the GPU what fits."""
        levers = candidate.levers
        if levers.offload == "none" or "offload_keep_bytes" in self.space.pins.levers:
            return None
        return self._largest(lambda size: levers.model_copy(update={"offload_keep_bytes": size}))

    def _largest(self, levers: Callable[[int], Levers]) -> Candidate | None:
        """With the most bytes that fit."""
        low, high, best = 0, self.space.machine.accelerator.memory_bytes // STEP_BYTES, None
        while low <= high:
            middle = (low + high) // 2
            try:
                tried = self._measured(levers(middle * STEP_BYTES))
            except UserError:  # a budget below what layers cannot do without
                low = middle + 1
                continue
            if self._fits(tried):
                best, low = tried, middle + 1
            else:
                high = middle - 1
        return best

    def _measured(self, levers: Levers) -> Candidate:
        gpu, host = peak(self.space.workload, self.layout, levers)
        return Candidate(self.layout, levers, self.frame.step(levers), gpu, host)

    def _fits(self, candidate: Candidate) -> bool:
        machine = self.space.machine
        host_fits = machine.host_bytes is None or candidate.host_bytes <= machine.host_bytes
        return host_fits and candidate.gpu_bytes <= COMFORT * machine.accelerator.memory_bytes


def cheapest_that_fits(space: Space, layout: Layout, wanted: Levers, room_bytes: int) -> Candidate | None:
    """The levers that cost least time beside `wanted` and make `layout` fit in `room_bytes`; None where none does."""
    frame = Costs(space.workload, space.machine).frame(layout)
    choices = space.levers_of(layout, space.levers())
    for levers in sorted((_joined(wanted, each) for each in choices), key=lambda each: frame.step(each).step_s):
        gpu, host = peak(space.workload, layout, levers)
        if gpu <= room_bytes and (space.machine.host_bytes is None or host <= space.machine.host_bytes):
            return Candidate(layout, levers, frame.step(levers), gpu, host)
    return None


def _joined(wanted: Levers, more: Levers) -> Levers:
    """`more`, with what of `wanted` the search does not decide."""
    decided = {name: getattr(more, name) for name in more.model_fields_set}
    return Levers(**(wanted.model_dump() | decided))
