"""Layout, levers, precision and shape together: nobody could train what breaks these."""

from tightfit.jobs.rules.rule import Rule, Run, rule
from tightfit.jobs.rules.shapes import indivisible, unshared_heads, unshared_rows

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


@rule(RUN_RULES, "levers.offload", "levers.checkpoint_every", "layout.zero")
def offloaded_weights_are_not_remembered_by_autograd(run: Run) -> str | None:
    """FSDP2 gathers them again for backward itself."""
    if run.levers.offload == "weights" and run.levers.checkpoint_every != 1 and not run.layout.zero:
        return (
            f"levers.offload is weights, which needs every layer run again in backward, but levers.checkpoint_every "
            f"is {run.levers.checkpoint_every}; set it to 1"
        )
    return None


@rule(RUN_RULES, "levers.update_in_backward", "layout", "precision")
def an_update_in_backward_needs_the_steps_gradient(run: Run) -> str | None:
    """It must be whole and finite when backward has passed a layer, and be freed then."""
    if not run.levers.update_in_backward:
        return None
    what, layout = "levers.update_in_backward frees gradients during backward", run.layout
    if run.accumulation > 1:
        return (
            f"{what}, but those of {run.accumulation} micro-batches add up and are all there before the last one's "
            "backward; raise layout.micro_batch, or leave the lever out"
        )
    if layout.pipeline > 1:
        return (
            f"{what}, but a pipeline's micro-batches add theirs up, and with one micro-batch all but one of "
            f"layout.pipeline={layout.pipeline} ranks would wait; set layout.pipeline=1, or leave the lever out"
        )
    if layout.reducing > 1 and not layout.zero:
        return f"{what}, but layout.zero is 0, where DDP's buckets hold all of them; set layout.zero to 1, 2 or 3"
    if run.precision == "fp16":
        return "levers.update_in_backward needs gradients that cannot overflow, but precision is fp16; set it to bf16"
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


@rule(RUN_RULES, "layout.context", "layout.ring", "layout.tensor", "model")
def context_ranks_share_heads(run: Run) -> str | None:
    layout = run.layout
    if run.spec is None or layout.exchanging == 1:
        return None
    return unshared_heads(run.spec, layout.tensor, layout.exchanging, layout.context)


@rule(RUN_RULES, "layout.context", "layout.ring", "data.sequence_length")
def context_ranks_share_rows(run: Run) -> str | None:
    if run.sequence_length is None or run.layout.context == 1:
        return None
    return unshared_rows(run.sequence_length, run.layout.context, run.layout.ring)


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
