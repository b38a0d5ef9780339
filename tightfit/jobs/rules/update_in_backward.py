"""Settings that updates inside backward do not go with."""

from tightfit.jobs.rules.rule import RUN_RULES, Run, rule


@rule(RUN_RULES, "levers.update_in_backward", "layout", "precision")
def an_update_in_backward_needs_the_steps_gradient(run: Run) -> str | None:
    """A layer's gradients must be complete and finite when backward has passed the layer, and be freed then."""
    if not run.levers.update_in_backward:
        return None
    what, layout = "levers.update_in_backward frees gradients during backward", run.layout
    if (run.accumulation or 1) > 1:
        return (
            f"{what}, but those of {run.accumulation} micro-batches add up and are all there before the last one's "
            "backward; raise layout.micro_batch, or leave the lever out"
        )
    if layout.pipeline > 1:
        return (
            f"{what}, but a pipeline's micro-batches add theirs up, and with one micro-batch all but one of "
            f"layout.pipeline={layout.pipeline} ranks would wait; set layout.pipeline=1, or leave the lever out"
        )
    if layout.gradient_ranks > 1 and not layout.zero:
        return f"{what}, but layout.zero is 0, where DDP's buckets hold all of them; set layout.zero to 1, 2 or 3"
    if run.precision == "fp16":
        return "levers.update_in_backward needs gradients that cannot overflow, but precision is fp16; set it to bf16"
    return None


@rule(RUN_RULES, "levers.update_in_backward", "layout.tensor_mesh")
def a_mesh_sums_gradients_once_a_step(run: Run) -> str | None:
    if run.levers.update_in_backward and run.layout.tensor_mesh != "1d":
        return (
            "levers.update_in_backward needs gradients that are whole when a layer is done, but a "
            f"{run.layout.tensor_mesh} mesh sums those of norms and copies once a step; set it to false"
        )
    return None


@rule(RUN_RULES, "levers.update_in_backward", "quantize.scales", "layout")
def learned_scales_are_summed_after_backward(run: Run) -> str | None:
    learned = run.rounding is not None and run.rounding.learned
    if run.levers.update_in_backward and learned and run.layout.ranks > 1:
        return (
            "quantize.scales is learned and its gradients are summed over ranks after backward, but "
            "levers.update_in_backward is set; set quantize.scales=minmax"
        )
    return None
