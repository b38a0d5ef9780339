"""What does not go with training for rounded weights."""

from tightfit.jobs.rules.rule import Run, rule
from tightfit.jobs.rules.run import RUN_RULES


@rule(RUN_RULES, "quantize.bits", "layout", "levers.tiles", "levers.matmul", "levers.offload")
def rounded_weights_are_whole(run: Run) -> str | None:
    """Groups are of whole rows, and tiles, fp8 and streamed weights have forward functions of their own."""
    if run.rounding is None:
        return None
    at_odds = (
        (run.layout.tensor > 1, f"layout.tensor is {run.layout.tensor}", "layout.tensor=1"),
        (run.layout.pipeline > 1, f"layout.pipeline is {run.layout.pipeline}", "layout.pipeline=1"),
        (run.levers.tiles > 1, f"levers.tiles is {run.levers.tiles}", "levers.tiles=1"),
        (run.levers.matmul != "native", f"levers.matmul is {run.levers.matmul}", "levers.matmul=native"),
        (run.levers.offload == "weights", "levers.offload is weights", "levers.offload=optimizer"),
    )
    for met, what, fix in at_odds:
        if met:
            return f"quantize.bits rounds whole weights of linear layers in forward, but {what}; set {fix}"
    return None


@rule(RUN_RULES, "quantize.scales", "layout", "levers.offload", "levers.update_in_backward")
def learned_scales_are_no_weights(run: Run) -> str | None:
    """Their gradients are summed over ranks after backward, and offloading is for weights of the model."""
    if run.rounding is None or not run.rounding.learned:
        return None
    if run.layout.ranks > 1 and run.levers.update_in_backward:
        return (
            "quantize.scales is learned and its gradients are summed over ranks after backward, but "
            "levers.update_in_backward is set; set quantize.scales=minmax"
        )
    if run.levers.offload != "none":
        return "quantize.scales is learned, but levers.offload is for weights of the model; set quantize.scales=minmax"
    return None


@rule(RUN_RULES, "quantize.group", "model")
def rows_are_whole_groups(run: Run) -> str | None:
    if run.rounding is None or run.spec is None:
        return None
    if run.spec.experts is not None or run.spec.latent is not None:
        return "quantize.bits rounds attention and dense MLPs, but the model has experts or latent attention; drop it"
    sizes = (run.spec.hidden_size, run.spec.query_size, run.spec.mlp_size)
    odd = next((size for size in sizes if size % run.rounding.group), None)
    if odd is None:
        return None
    fits = next((group for group in (128, 64, 32, 16, 8) if all(size % group == 0 for size in sizes)), 8)
    return f"quantize.group is {run.rounding.group}, but rows of {odd} weights are no whole groups; take {fits}"
