"""Settings that the plain loss does not go with."""

from tightfit.jobs.rules.rule import RUN_RULES, Run, rule


@rule(RUN_RULES, "levers.loss", "layout.tensor")
def tensor_ranks_hold_part_of_the_logits(run: Run) -> str | None:
    if run.levers.loss == "plain" and run.layout.tensor > 1:
        return (
            f"levers.loss is plain, which needs all logits, but layout.tensor is {run.layout.tensor}; "
            "set levers.loss=fused"
        )
    return None


@rule(RUN_RULES, "distill.teacher", "levers.loss")
def distillation_is_fused(run: Run) -> str | None:
    if run.distills and run.levers.loss == "plain":
        return "levers.loss is plain, but distill.teacher has a fused loss of its own; set levers.loss=fused"
    return None
