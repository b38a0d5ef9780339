"""Settings that recomputed layers do not go with."""

from typing import TYPE_CHECKING

from tightfit.jobs.rules.rule import LEVER_RULES, RUN_RULES, Run, rule

if TYPE_CHECKING:
    from tightfit.jobs.levers import Levers


def is_checkpointed(levers: "Levers") -> bool:
    """Whether any layer may be recomputed in backward."""
    return bool(levers.checkpoint_every or levers.num_checkpoints or levers.checkpoint_budget_bytes is not None)


def missing_layers(count: int, model_layers: int) -> str | None:
    """A sentence if more layers are to be recomputed than a model has."""
    if count <= model_layers:
        return None
    return f"levers.num_checkpoints is {count}, but the model has {model_layers} layers; give at most that many"


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


@rule(LEVER_RULES, "offload_checkpoints", "checkpoint_every", "num_checkpoints", "checkpoint_budget_bytes")
def offloaded_checkpoints_need_checkpoints(levers: "Levers") -> str | None:
    if levers.offload_checkpoints and not is_checkpointed(levers):
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


@rule(RUN_RULES, "levers.num_checkpoints", "model")
def checkpointed_layers_exist(run: Run) -> str | None:
    return None if run.spec is None else missing_layers(run.levers.num_checkpoints, run.spec.layers)


@rule(RUN_RULES, "levers.checkpoint_keep", "levers.checkpoint_budget_bytes", "layout.tensor_mesh")
def a_mesh_keeps_attention_or_nothing(run: Run) -> str | None:
    kind, levers = run.layout.tensor_mesh, run.levers
    if kind == "1d":
        return None
    if levers.checkpoint_keep == "matmuls":
        return f"levers.checkpoint_keep is matmuls, but products of a {kind} mesh are sums of several; set attention"
    if levers.checkpoint_budget_bytes is not None:
        return (
            f"levers.checkpoint_budget_bytes chooses by the sizes of whole rows, which ranks of a {kind} mesh do not "
            "have; use levers.checkpoint_every"
        )
    return None
