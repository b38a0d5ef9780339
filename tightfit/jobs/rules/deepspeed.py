"""What `engine: deepspeed` supports: data ranks under ZeRO-1, 2 and 3 with AdamW in float32, offloaded if asked."""

from typing import TYPE_CHECKING

from tightfit.jobs.lever_table import LEVER_TABLE
from tightfit.jobs.rules.rule import DEEPSPEED_RULES, Run, rule

if TYPE_CHECKING:
    from tightfit.jobs.layout import Layout

WORK_WITH_DEEPSPEED = tuple(row.name for row in LEVER_TABLE if row.works_with_deepspeed)
"""Levers that change what happens inside a layer or its loss, or that DeepSpeed has itself."""


def other_axis(layout: "Layout") -> tuple[str, int] | None:
    """Name and degree of the first split of `layout` besides data ranks, or of hybrid sharding; None without."""
    inside = ("shard_inside", layout.shard_inside) if layout.shard_inside else None
    return next(iter(layout.splits.items()), inside)


@rule(DEEPSPEED_RULES, "layout")
def deepspeed_splits_over_data_ranks(run: Run) -> str | None:
    if other := other_axis(run.layout):
        return f"layout.{other[0]} is {other[1]}, but DeepSpeed splits over data ranks only; set engine to tightfit"
    return None


@rule(DEEPSPEED_RULES, "distill.teacher")
def deepspeed_has_no_teacher(run: Run) -> str | None:
    if run.distills:
        return "distill.teacher is compared with by tightfit's own engine, but engine is deepspeed; set it to tightfit"
    return None


@rule(DEEPSPEED_RULES, "quantize.bits")
def deepspeed_rounds_nothing(run: Run) -> str | None:
    if run.rounding is not None:
        return "quantize.bits is trained for by tightfit's own engine, but engine is deepspeed; set it to tightfit"
    return None


@rule(DEEPSPEED_RULES, "model")
def deepspeed_does_not_correct_choices(run: Run) -> str | None:
    if run.spec is not None and run.spec.experts is not None and run.spec.experts.corrected:
        return f"engine is deepspeed, but {run.spec.family} balances experts after each step; set engine to tightfit"
    return None


@rule(DEEPSPEED_RULES, "precision")
def deepspeed_keeps_masters(run: Run) -> str | None:
    if run.precision == "pure-bf16":
        return "precision is pure-bf16, but engine deepspeed keeps float32 master weights; set precision to bf16"
    return None


@rule(DEEPSPEED_RULES, "levers")
def deepspeed_has_no_other_levers(run: Run) -> str | None:
    for name, value in run.levers:
        if name not in WORK_WITH_DEEPSPEED and value != type(run.levers).model_fields[name].default:
            return (
                f"levers.{name} is {value}, which engine deepspeed does not do; leave it out or set engine to tightfit"
            )
    return None
