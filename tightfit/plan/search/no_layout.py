"""Why a search space has no layout: levers or degrees that do not agree, a rule that the pins break, or the batch."""

import math
from collections import Counter
from dataclasses import replace
from itertools import islice

from tightfit.counted import counted
from tightfit.errors import UserError
from tightfit.jobs.levers import Levers
from tightfit.jobs.rules.refusals import refused_levers
from tightfit.plan.search.layouts import MOST_PIPELINED_LAYERS, RANK_DEGREES
from tightfit.plan.search.lever_choices import NO_LEVERS
from tightfit.plan.search.space import SearchSpace

ASKED_REASONS = 64
"""Refused layouts whose reasons are counted."""


def check(space: SearchSpace) -> None:
    """Raise a UserError if pins or the batch leave no layout or no levers."""
    if not space.levers():
        alone = Levers.model_construct(**space.pins.levers)
        raise UserError(refused_levers(alone) or f"no set of levers agrees with all of {space.pins}; drop one")
    if next(space.layouts(), None) is None:
        raise UserError(why_no_layout(space))


def why_no_layout(space: SearchSpace) -> str:
    """A sentence with the first reason that is found."""
    ranks, pins, layers = space.machine.ranks, space.pins.layout, space.workload.spec.layers
    degrees = {name: pins[name] for name in RANK_DEGREES if name in pins}
    for name, value in degrees.items():
        if ranks % value:
            return f"layout.{name} is {value}, which does not divide the machine's {counted(ranks, 'GPU')}; change one"
    if pins.get("pipeline", 1) > 1 and layers > MOST_PIPELINED_LAYERS:
        return f"layout.pipeline is {pins['pipeline']}, which {layers} layers are planned without; drop it"
    if ranks % math.prod(degrees.values()):
        product_of = " × ".join(f"layout.{name}={value}" for name, value in degrees.items())
        return f"{product_of} does not divide the machine's {counted(ranks, 'GPU')}; change one"
    if sentence := space.refusal(space.every_layout.pinned_alone(), NO_LEVERS):
        return sentence
    rows_at_once, global_batch = pins.get("micro_batch", 1) * pins.get("data", 1), space.workload.global_batch
    if rows_at_once and global_batch % rows_at_once:
        return (
            f"global batch {global_batch} is not a multiple of the pinned micro-batch × data ranks "
            f"({rows_at_once}); change one"
        )
    return _batch_does_not_divide(space) or _rule_or_pin(space)


def _batch_does_not_divide(space: SearchSpace) -> str | None:
    """A sentence about a global batch that does not divide, if another number of rows would leave a layout."""
    machine, workload = space.machine, space.workload
    rows = machine.ranks * space.pins.layout.get("micro_batch", 1)
    if not _has_layout(replace(space, workload=replace(workload, global_batch=rows))):
        return None
    pinned = f" with {space.pins}" if space.pins else ""
    return (
        f"global batch {workload.global_batch} cannot be split over the {machine.ranks} GPUs of "
        f"{machine.text}{pinned}; take a multiple of {rows} rows"
    )


def _rule_or_pin(space: SearchSpace) -> str:
    """A sentence with the rule that most layouts break, or the pin without which there would be a layout."""
    pins, machine = space.pins, space.machine.text
    alone = (each for each in pins.own() if _has_layout(replace(space, pins=pins.without(*each))))
    section, name = next(alone, ("", ""))
    culprit = f"{section}.{name}" if section else ""
    reasons = (space.reason(layout) for family in space.every_layout.families() for layout in family)
    counts = Counter(reason for reason in islice(reasons, ASKED_REASONS) if reason and culprit in reason)
    if counts:  # the most common reason is not one that another micro-batch or degree would fix
        pinned = f" that agrees with {pins}" if pins else ""
        return f"{machine} has no layout{pinned}: {counts.most_common(1)[0][0]}"
    if not culprit:
        return f"no layout of {machine} agrees with all of {pins}; drop one"
    others, value = pins.without(section, name), getattr(pins, section)[name]
    beside = f" beside {others}" if others else ""
    return f"no layout of {machine} for {space.workload.spec.family} agrees with {culprit}={value}{beside}; drop it"


def _has_layout(space: SearchSpace) -> bool:
    return bool(space.levers()) and next(space.layouts(), None) is not None
