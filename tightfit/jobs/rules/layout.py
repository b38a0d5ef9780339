"""What degrees of a layout contradict each other in."""

from typing import TYPE_CHECKING

from tightfit.jobs.rules.rule import Rule, first_refusal, rule

if TYPE_CHECKING:
    from tightfit.jobs.layout import Layout

LAYOUT_RULES: "list[Rule[Layout]]" = []


def refused_layout(layout: "Layout") -> str | None:
    """The first contradiction; None where there is none."""
    return first_refusal(LAYOUT_RULES, layout)


@rule(LAYOUT_RULES, "zero", "data", "context")
def zero_needs_ranks(layout: "Layout") -> str | None:
    if layout.zero and layout.data == 1 and layout.context == 1:
        return f"layout.zero is {layout.zero}, but one data rank has nobody to split with; raise layout.data"
    return None


@rule(LAYOUT_RULES, "shard_inside", "data", "zero")
def groups_divide_data_ranks(layout: "Layout") -> str | None:
    if layout.shard_inside and (not layout.zero or layout.data % layout.shard_inside):
        return (
            f"layout.shard_inside is {layout.shard_inside}, but layout.data is {layout.data} and layout.zero is "
            f"{layout.zero}; give a divisor of the data ranks, and say what they split with layout.zero"
        )
    return None


@rule(LAYOUT_RULES, "ring", "context")
def a_ring_is_of_context_ranks(layout: "Layout") -> str | None:
    if layout.context % layout.ring:
        return (
            f"layout.ring is {layout.ring}, which does not divide the {layout.context} context ranks; give a divisor, "
            "or 1 to exchange heads alone"
        )
    return None


@rule(LAYOUT_RULES, "expert", "data", "context")
def expert_ranks_are_data_ranks(layout: "Layout") -> str | None:
    ranks = layout.data * layout.context
    if ranks % layout.expert:
        return f"layout.expert is {layout.expert}, which does not divide the {ranks} data × context ranks; change one"
    return None


@rule(LAYOUT_RULES, "expert", "shard_inside")
def groups_hold_all_experts(layout: "Layout") -> str | None:
    if layout.shard_inside and layout.shard_inside % layout.expert:
        return (
            f"layout.shard_inside is {layout.shard_inside}, but its ranks hold all experts between them and "
            f"layout.expert is {layout.expert}; give a multiple of it"
        )
    return None


@rule(LAYOUT_RULES, "stages_per_rank", "schedule", "pipeline")
def several_stages_interleave(layout: "Layout") -> str | None:
    if layout.schedule == "zb-v" and (layout.pipeline == 1 or layout.stages_per_rank != 2):
        return (
            f"layout.stages_per_rank is {layout.stages_per_rank} under schedule zb-v on {layout.pipeline} pipeline "
            "ranks, of which each has two; set stages_per_rank to 2 and pipeline to at least 2, or take 1f1b"
        )
    several = layout.schedule in ("interleaved", "zb-v") and layout.pipeline > 1
    if (layout.stages_per_rank > 1) != several:
        return (
            f"layout.stages_per_rank is {layout.stages_per_rank} under schedule {layout.schedule} on "
            f"{layout.pipeline} pipeline ranks; more than one is what the interleaved schedule of a pipeline has"
        )
    return None
