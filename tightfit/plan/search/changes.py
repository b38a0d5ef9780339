"""Changes: what would make a plan fit that does not, the smallest step of each kind, and its step's time.

Tried are: dropping each pin, lossless levers that the search leaves out, more host memory, narrower states, fewer bits
of a model under adapters, no master weights, shorter rows, fewer cards (one card saves states from the
host without a copy), more cards, another card. Whether a change is enough is decided with the strongest levers; of the
layouts that then fit, only the MOST_SEARCHED most promising families are searched for the plan whose time and host
memory are reported, so there may be a faster one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import ceil
from operator import itemgetter
from typing import Any, get_args

from tightfit.errors import UserError
from tightfit.hardware.catalog import larger_cards
from tightfit.jobs.adapter import Adapted, FrozenBase, HeldBits, held_in
from tightfit.jobs.layout import Layout
from tightfit.jobs.lever_table import LEVER_TABLE
from tightfit.plan.search.candidate import Candidate, Pricing
from tightfit.plan.search.lever_choices import HostUse
from tightfit.plan.search.search import search
from tightfit.plan.search.space import SearchSpace
from tightfit.plan.seconds.rates import NUMBERS

MOST_RANKS = 16_384
LEAST_TOKENS = 128
MOST_SEARCHED = 6
"""Families of layouts that are searched for a change's time."""
Variants = Iterator[tuple[str, SearchSpace]]
"""Values of one kind of change, the smallest first: its text and the search space with it."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing to change, its new value, and the step's time and host memory with it."""

    what: str
    to: str
    step_s: float
    host_bytes: int = 0
    """Host bytes of a node while a checkpoint is written; 0 where the host's size is known, or little is needed."""

    def __str__(self) -> str:
        host = f" (and {self.host_bytes / 2**30:.0f} GiB of host memory a node)" if self.host_bytes else ""
        return f"{self.what}: {self.to}{host}, {self.step_s:.3g} s a step"


def changes(space: SearchSpace) -> list[Change]:
    """The smallest change of each kind with which some plan fits."""
    let_go = (_smallest(what, variants) for what, variants in _without_a_pin(space))
    others = (_smallest(what, variants) for what, variants in _beside_levers(space))
    found = (*let_go, *_lever_changes(space), _more_host(space), *others)
    return [change for change in found if change is not None]


def _without_a_pin(space: SearchSpace) -> Iterator[tuple[str, Variants]]:
    for section, name in sorted(space.pins.own(), key=itemgetter(0), reverse=True):  # levers first
        without = replace(space, pins=space.pins.without(section, name))
        yield "the planner's choice", iter([(f"{section}.{name}", without)])


def _lever_changes(space: SearchSpace) -> list[Change | None]:
    """Levers that the search leaves out and each of which is enough; if none is, pairs of them, and so on."""
    advised = [(row.name, *row.advice) for row in LEVER_TABLE if row.advice and row.name not in space.pins.levers]
    for count in range(1, len(advised) + 1):
        several = combinations(advised, count)
        found = [_smallest(" and ".join(what for _, what, _ in some), _with_levers(space, some)) for some in several]
        if any(found):
            return found
    return []


def _with_levers(space: SearchSpace, some: Sequence[tuple[str, str, tuple[Any, ...]]]) -> Variants:
    """`space` with these levers pinned, for every combination of their values."""
    names = [name for name, _, _ in some]
    for values in product(*(values for _, _, values in some)):
        chosen = dict(zip(names, values, strict=True))
        changed = replace(space, pins=space.pins.with_levers(chosen))
        yield " ".join(f"-o levers.{name}={value}" for name, value in chosen.items()), changed


def _more_host(space: SearchSpace) -> Change | None:
    """The host memory that a node would need, also while a checkpoint is written."""
    if not space.machine.host_bytes:  # None: the size is unknown and does not limit; 0: there is no separate host
        return None
    plan = fitting(replace(space, machine=replace(space.machine, host_bytes=None)))
    if plan is None:
        return None
    return Change(what="more host memory", to=f"--host-memory {ceil(plan.host_peak_bytes / 1e9)}GB", step_s=plan.step_s)


def _beside_levers(space: SearchSpace) -> Iterator[tuple[str, Variants]]:
    if not space.lossy:
        yield "narrower optimizer states", iter([("--allow-lossy", replace(space, lossy=True))])
    if (adapted := space.workload.adapted) is not None and adapted.base.coded_bytes is None:
        yield "fewer bits of the frozen model", _fewer_bits(space, adapted)
    if space.workload.has_masters and space.machine.accelerator.rates.bf16:
        pure = replace(space, workload=replace(space.workload, precision="pure-bf16"))
        yield "no float32 master weights", iter([("--precision pure-bf16 (lossy)", pure)])
    yield "shorter rows", _fewer_tokens(space)
    if space.machine.accelerator.form not in ("soc", "cpu"):  # which are whole computers
        yield "fewer cards", _fewer_cards(space)
        yield "more cards", _more_cards(space)
    yield "another card", _other_cards(space)


def _smallest(what: str, variants: Variants) -> Change | None:
    """The first of `variants` with which some plan fits."""
    for to, changed in variants:
        if plan := fitting(changed):
            is_left_open = changed.machine.host_bytes is None and plan.host_bytes > 2**30
            host_bytes = plan.host_peak_bytes if is_left_open else 0
            return Change(what=what, to=to, step_s=plan.step_s, host_bytes=host_bytes)
    return None


def fitting(space: SearchSpace) -> Candidate | None:
    """A plan that fits, with levers of last resort if needed; None if there is none."""
    if (plan := _fitting(space)) or (with_last_resort := space.last_resort()) is None:
        return plan
    return _fitting(with_last_resort)


def _fitting(space: SearchSpace) -> Candidate | None:
    """A plan that fits, without levers of last resort; levers that use no host memory are tried first."""
    try:
        pricing, levers = Pricing(space), space.levers()
        families = list(space.families(lambda layout: pricing.card_may_hold(layout, levers[-1]))) if levers else []
        lean = [(family, space.leanest(family)) for family in families]
        if space.machine.host_bytes is None:  # a layout that does not fit with the strongest levers fits with no others
            lean = [(family, leanest) for family, leanest in lean if _fits_with(pricing, leanest, None)]
        for group in levers.groups if lean else ():
            if fit := [family for family, leanest in lean if _fits_with(pricing, leanest, group)]:
                return search(space, sorted(fit, key=lambda family: _bound_s(pricing, family))[:MOST_SEARCHED]).best
    except UserError:  # pins contradict the change, or the card lacks the number format
        pass
    return None


def _fits_with(pricing: Pricing, leanest: list[Layout], group: HostUse | None) -> bool:
    """Whether one of a family's leanest layouts fits with the strongest levers of `group`, or the strongest of all."""
    for layout in leanest:
        allowed = pricing.space.levers_of(layout)
        strongest = allowed if group is None else allowed.groups.get(group)
        if strongest and pricing.fits(layout, strongest[-1]):
            return True
    return False


def _bound_s(pricing: Pricing, family: list[Layout]) -> float:
    """A lower bound of the family's step time: that of its leanest layout with the weakest levers."""
    return pricing.costs.step(family[0], pricing.space.levers_of(family[0])[0]).step_s


def _fewer_bits(space: SearchSpace, adapted: Adapted) -> Variants:
    """The frozen model under adapters in every narrower width."""
    scheme = adapted.base.scheme
    for bits in sorted(get_args(HeldBits), reverse=True):
        if scheme is None or bits < scheme.bits:
            held = replace(adapted, base=FrozenBase(scheme=held_in(bits)))
            yield f"--bits {bits} (lossy)", replace(space, workload=replace(space.workload, adapted=held))


def _fewer_tokens(space: SearchSpace) -> Variants:
    """Half as many tokens per row, repeatedly."""
    length = space.workload.sequence_length // 2
    while length >= LEAST_TOKENS:
        yield f"--seq {length}", replace(space, workload=replace(space.workload, sequence_length=length))
        length //= 2


def _fewer_cards(space: SearchSpace) -> Variants:
    """Half as many cards, repeatedly: nodes down to one, then cards of that node."""
    machine = space.machine
    while machine.ranks > 1:
        one_node = machine.nodes == 1
        machine = machine.with_counts(max(1, machine.nodes // 2), machine.per_node // (2 if one_node else 1))
        yield machine.text, replace(space, machine=machine)


def _more_cards(space: SearchSpace) -> Variants:
    """Twice as many cards, repeatedly: inside the node up to eight, then more nodes."""
    machine = space.machine
    while machine.ranks * 2 <= MOST_RANKS:
        inside = machine.nodes == 1 and machine.per_node * 2 <= 8
        nodes, per_node = (1, machine.per_node * 2) if inside else (machine.nodes * 2, machine.per_node)
        machine = machine.with_counts(nodes, per_node)
        yield machine.text, replace(space, machine=machine)


def _other_cards(space: SearchSpace) -> Variants:
    """As many larger cards, the smallest first."""
    machine = space.machine
    for card in larger_cards(machine.accelerator):
        if card.rates.of(NUMBERS[space.workload.precision]) is None:
            continue
        other = machine.with_card(card)
        yield other.text, space.with_card(other)
