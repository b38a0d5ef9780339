"""What levers contradict each other in, whatever the model and the machine."""

from typing import TYPE_CHECKING

from tightfit.jobs.rules.rule import Rule, first_refusal, rule

if TYPE_CHECKING:
    from tightfit.jobs.levers import Levers

LEVER_RULES: "list[Rule[Levers]]" = []


def refused_levers(levers: "Levers") -> str | None:
    """The first contradiction; None where there is none."""
    return first_refusal(LEVER_RULES, levers)


def recomputes(levers: "Levers") -> bool:
    """Whether any layer may be computed again in backward."""
    return bool(levers.checkpoint_every or levers.num_checkpoints or levers.checkpoint_budget_bytes is not None)


@rule(LEVER_RULES, "checkpoint_every", "num_checkpoints")
def layers_are_chosen_once(levers: "Levers") -> str | None:
    if levers.checkpoint_every and levers.num_checkpoints:
        return f"levers.num_checkpoints is {levers.num_checkpoints} beside levers.checkpoint_every; leave one at 0"
    return None


@rule(LEVER_RULES, "checkpoint_budget_bytes", "checkpoint_every", "num_checkpoints", "checkpoint_keep")
def a_budget_chooses_by_itself(levers: "Levers") -> str | None:
    named = levers.checkpoint_every or levers.num_checkpoints or levers.checkpoint_keep != "nothing"
    if levers.checkpoint_budget_bytes is not None and named:
        return (
            "levers.checkpoint_budget_bytes chooses layers and what they keep itself; leave "
            "levers.checkpoint_every, num_checkpoints and checkpoint_keep out"
        )
    return None


@rule(LEVER_RULES, "checkpoint_keep", "checkpoint_every", "num_checkpoints")
def keeping_needs_recomputed_layers(levers: "Levers") -> str | None:
    if levers.checkpoint_keep != "nothing" and not levers.checkpoint_every and not levers.num_checkpoints:
        return f"levers.checkpoint_keep is {levers.checkpoint_keep}, but no layer is recomputed; set checkpoint_every=1"
    return None


@rule(LEVER_RULES, "checkpoint_keep", "tiles")
def tiles_do_not_hold_products(levers: "Levers") -> str | None:
    if levers.checkpoint_keep == "matmuls" and levers.tiles > 1:
        return "levers.checkpoint_keep is matmuls, which levers.tiles are there not to hold; set it to attention"
    return None


@rule(LEVER_RULES, "offload_checkpoints", "checkpoint_every", "num_checkpoints", "checkpoint_budget_bytes")
def offloaded_checkpoints_need_checkpoints(levers: "Levers") -> str | None:
    if levers.offload_checkpoints and not recomputes(levers):
        return "levers.offload_checkpoints moves checkpoints, but levers.checkpoint_every is 0; set it to 1"
    return None


@rule(LEVER_RULES, "checkpoint_budget_bytes", "checkpoint_host_bytes")
def a_budget_offloads_all_inputs(levers: "Levers") -> str | None:
    if levers.checkpoint_budget_bytes is not None and levers.checkpoint_host_bytes is not None:
        return "levers.checkpoint_budget_bytes counts on all inputs going to the host; leave checkpoint_host_bytes out"
    return None


@rule(LEVER_RULES, "checkpoint_host_bytes", "checkpoint_format", "offload_checkpoints")
def host_settings_need_offloaded_checkpoints(levers: "Levers") -> str | None:
    names = (("checkpoint_host_bytes", None), ("checkpoint_format", "exact"))
    given = next((name for name, default in names if getattr(levers, name) != default), None)
    if given and not levers.offload_checkpoints:
        return f"levers.{given} is for offloaded checkpoints; set levers.offload_checkpoints to true"
    return None
