"""Fill: trade the memory that a plan leaves free on the card for time.

The search tries levers in coarse steps, so a plan that fits may leave gigabytes unused. On one GPU they are spent here:
on a budget of activations in place of recomputing whole layers (levers/policy/budget.py picks which), and on
optimizer states that stay on the GPU (`offload_keep_bytes`). Each is the largest that still fits, by bisection; both
orders are tried and the faster plan is taken. Pinned levers are not changed.
"""

from bisect import bisect_left
from collections.abc import Callable

from tightfit.errors import UserError
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.levers.policy.offload import offloads_states, offloads_weights
from tightfit.plan.search.candidate import Candidate, Pricing
from tightfit.plan.search.search import COMFORT
from tightfit.plan.search.space import SearchSpace

STEP_BYTES = 64 * 2**20
MOST_LAYERS = 64
"""Budgets of deeper models take seconds to compute."""
CHECKPOINTING = ("checkpoint_every", "num_checkpoints", "checkpoint_keep", "checkpoint_budget_bytes")
WORTH = 0.99
"""A plan with another lever is taken if its step takes less than this share of the time without it."""
WithBytes = Callable[[int], Levers]


def fill_card(space: SearchSpace, candidate: Candidate) -> Candidate:
    """`candidate`, or a faster one with the same layout that fills the card better."""
    if space.machine.ranks > 1:
        return candidate
    pricing = Pricing(space)
    found = [candidate]
    for order in ((_keep_activations, _keep_states), (_keep_states, _keep_activations)):
        best = candidate
        for spend in order:
            levers = spend(space, best.levers)
            better = levers and _largest(pricing, candidate.layout, levers)
            if better and better.step_s < WORTH * best.step_s:
                best = better
        found.append(best)
    return min(found, key=lambda each: each.step_s)


def _keep_activations(space: SearchSpace, levers: Levers) -> WithBytes | None:
    """From bytes to levers with a budget of so many bytes of activations, in place of recomputing whole layers."""
    if not levers.checkpoint_every or offloads_weights(levers) or space.workload.spec.layers > MOST_LAYERS:
        return None
    if any(name in space.pins.levers for name in CHECKPOINTING) or levers.checkpoint_host_bytes is not None:
        return None
    bare = levers.model_copy(update={"checkpoint_every": 0, "checkpoint_keep": "nothing"})
    return lambda size: bare.model_copy(update={"checkpoint_budget_bytes": size})


def _keep_states(space: SearchSpace, levers: Levers) -> WithBytes | None:
    """From bytes to levers that keep so many bytes of offloaded states on the GPU."""
    if not offloads_states(levers) or "offload_keep_bytes" in space.pins.levers:
        return None
    return lambda size: levers.model_copy(update={"offload_keep_bytes": size})


def _largest(pricing: Pricing, layout: Layout, levers: WithBytes) -> Candidate | None:
    """The candidate with the most bytes that fit."""
    machine = pricing.space.machine

    def tried(steps: int) -> Candidate | None:
        try:
            return pricing.candidate(layout, levers(steps * STEP_BYTES))
        except UserError:  # a budget smaller than what layers keep at the least
            return None

    def is_too_much(steps: int) -> bool:
        found = tried(steps)
        return found is not None and not found.fits(machine, COMFORT)

    most = bisect_left(range(machine.accelerator.memory_bytes // STEP_BYTES + 1), True, key=is_too_much) - 1
    return tried(most) if most >= 0 else None
