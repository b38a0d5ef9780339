"""Layout, levers, precision and shape together: nobody could train what breaks these."""

from tightfit.jobs.rules.rule import Rule, Run, rule
from tightfit.jobs.rules.shapes import indivisible

RUN_RULES: list[Rule[Run]] = []


@rule(RUN_RULES, "levers.rounding", "precision")
def stochastic_rounding_is_for_weights_without_masters(run: Run) -> str | None:
    if run.levers.rounding == "stochastic" and run.precision not in (None, "pure-bf16"):
        return (
            f"levers.rounding is stochastic, which is for weights without float32 masters, but precision is "
            f"{run.precision}; set precision to pure-bf16"
        )
    return None


@rule(RUN_RULES, "levers.optimizer_states", "layout.zero")
def factored_states_need_whole_weights(run: Run) -> str | None:
    if run.levers.optimizer_states == "factored" and run.layout.zero:
        return (
            f"levers.optimizer_states is factored, which needs all rows of a weight, but layout.zero is "
            f"{run.layout.zero}; set layout.zero to 0 or take 8bit"
        )
    return None


@rule(RUN_RULES, "levers.offload", "levers.checkpoint_every")
def offloaded_weights_are_not_remembered_by_autograd(run: Run) -> str | None:
    if run.levers.offload == "weights" and run.levers.checkpoint_every != 1:
        return (
            f"levers.offload is weights, which needs every layer run again in backward, but levers.checkpoint_every "
            f"is {run.levers.checkpoint_every}; set it to 1"
        )
    return None


@rule(RUN_RULES, "levers.update_in_backward", "layout", "precision")
def an_update_in_backward_needs_the_steps_gradient(run: Run) -> str | None:
    """It must be whole and finite at the end of one backward pass, on the one rank that adds to it."""
    if not run.levers.update_in_backward:
        return None
    needs = "levers.update_in_backward needs"
    if run.accumulation > 1:
        return f"{needs} the whole batch in one backward, but there are {run.accumulation}; raise layout.micro_batch"
    if run.layout.ranks > 1:
        return f"{needs} gradients that no other rank adds to, but the layout has {run.layout.ranks} ranks; use one"
    if run.precision == "fp16":
        return f"{needs} gradients that cannot overflow, but precision is fp16; set it to bf16"
    return None


@rule(RUN_RULES, "layout.tensor", "model")
def tensor_ranks_divide_the_model(run: Run) -> str | None:
    return None if run.spec is None else indivisible(run.spec, run.layout.tensor)


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


@rule(RUN_RULES, "layout.pipeline", "layout.stages_per_rank", "model")
def a_stage_has_a_layer(run: Run) -> str | None:
    stages = run.layout.pipeline * run.layout.stages_per_rank
    if run.spec is None or stages <= run.spec.layers:
        return None
    if run.layout.stages_per_rank > 1:
        return (
            f"layout.pipeline × stages_per_rank is {stages}, but the model has {run.spec.layers} layers; give at most "
            "that many"
        )
    return f"layout.pipeline is {stages}, but the model has {run.spec.layers} layers; give at most that many"


@rule(RUN_RULES, "levers.num_checkpoints", "model")
def checkpointed_layers_exist(run: Run) -> str | None:
    count = run.levers.num_checkpoints
    if run.spec is None or count <= run.spec.layers:
        return None
    return f"levers.num_checkpoints is {count}, but the model has {run.spec.layers} layers; give at most that many"
