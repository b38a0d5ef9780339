"""Settings that expert ranks do not go with."""

from typing import TYPE_CHECKING

from tightfit.jobs.rules.rule import LAYOUT_RULES, RUN_RULES, Run, rule
from tightfit.jobs.rules.tensor_mesh import beside_a_mesh

if TYPE_CHECKING:
    from tightfit.jobs.layout import Layout


@rule(LAYOUT_RULES, "expert", "data")
def expert_ranks_are_data_ranks(layout: "Layout") -> str | None:
    if layout.gradient_ranks % layout.expert:
        return (
            f"layout.expert is {layout.expert}, which does not divide the {layout.gradient_ranks} data × context "
            "ranks; change one"
        )
    return None


@rule(LAYOUT_RULES, "expert", "shard_inside")
def groups_hold_all_experts(layout: "Layout") -> str | None:
    if layout.shard_inside and layout.shard_inside % layout.expert:
        return (
            f"layout.shard_inside is {layout.shard_inside}, but its ranks hold all experts between them and "
            f"layout.expert is {layout.expert}; give a multiple of it"
        )
    return None


@rule(LAYOUT_RULES, "expert", "tensor_mesh")
def experts_take_whole_hidden_states(layout: "Layout") -> str | None:
    return beside_a_mesh(layout, "expert", "whose tokens are sent with their whole hidden states")


@rule(RUN_RULES, "layout.expert", "model")
def expert_ranks_divide_the_experts(run: Run) -> str | None:
    expert = run.layout.expert
    if run.spec is None or expert == 1:
        return None
    if run.spec.experts is None:
        return f"layout.expert is {expert}, but {run.spec.family} has no experts; set it to 1"
    if run.spec.experts.count % expert:
        return (
            f"layout.expert is {expert}, which does not divide the model's {run.spec.experts.count} experts; "
            "give a divisor of them"
        )
    return None
