"""Settings that offloaded states and weights do not go with."""

from tightfit.jobs.rules.rule import DEEPSPEED_RULES, RUN_RULES, Run, rule


@rule(RUN_RULES, "levers.offload", "levers.checkpoint_every", "layout.zero")
def offloaded_weights_are_not_remembered_by_autograd(run: Run) -> str | None:
    """Streamed weights are freed after a layer's forward, so autograd cannot save them; FSDP2 gathers them again."""
    if run.levers.offload == "weights" and run.levers.checkpoint_every != 1 and not run.layout.zero:
        return (
            f"levers.offload is weights, which needs every layer run again in backward, but levers.checkpoint_every "
            f"is {run.levers.checkpoint_every}; set it to 1"
        )
    return None


@rule(RUN_RULES, "levers.offload", "levers.optimizer_states")
def offloaded_states_are_rows(run: Run) -> str | None:
    if run.levers.offload != "none" and run.levers.optimizer_states == "factored":
        return (
            "levers.optimizer_states is factored, whose second moment is two vectors a matrix, of which the host would "
            "have nothing to hold and no piece can be updated without all rows; take 8bit, or set levers.offload=none"
        )
    return None


@rule(RUN_RULES, "levers.offload", "quantize.scales")
def learned_scales_stay_on_the_gpu(run: Run) -> str | None:
    if run.levers.offload != "none" and run.rounding is not None and run.rounding.learned:
        return "quantize.scales is learned, but levers.offload is for weights of the model; set quantize.scales=minmax"
    return None


@rule(RUN_RULES, "levers.offload", "adapter.rank")
def adapters_stay_on_the_gpu(run: Run) -> str | None:
    if run.levers.offload != "none" and run.adapted is not None:
        return (
            f"levers.offload is {run.levers.offload}, but the states of adapters are small and their model is frozen; "
            "set it to none, and adapter.bits=4 for less memory"
        )
    return None


@rule(RUN_RULES, "levers.offload", "optimizer.l1")
def pieces_do_not_shrink(run: Run) -> str | None:
    if run.levers.offload != "none" and run.weight_setting:
        return (
            f"levers.offload is {run.levers.offload}, whose weights are updated piece by piece where "
            f"{run.weight_setting} does not reach them; set levers.offload to none, or leave that out"
        )
    return None


@rule(RUN_RULES, "layout.schedule", "levers.offload")
def two_versions_are_weights_on_the_gpu(run: Run) -> str | None:
    if run.layout.has_two_versions and run.levers.offload != "none":
        return (
            f"levers.offload is {run.levers.offload}, whose updates are still on their way when the next step begins, "
            "but schedule 2bw exchanges two versions of the weights then; set it to none or take 1f1b"
        )
    return None


@rule(DEEPSPEED_RULES, "layout.zero", "levers.offload")
def deepspeed_has_something_to_do(run: Run) -> str | None:
    if not run.layout.zero and run.levers.offload == "none":
        return (
            "layout.zero is 0 and levers.offload is none, which leaves engine deepspeed nothing to do; set layout.zero "
            "to 1, 2 or 3, or engine to tightfit"
        )
    return None
