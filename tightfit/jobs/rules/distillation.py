"""What does not go with a teacher."""

from tightfit.jobs.rules.rule import Run, rule
from tightfit.jobs.rules.run import RUN_RULES


@rule(RUN_RULES, "distill.teacher", "layout")
def a_student_is_whole(run: Run) -> str | None:
    """The loss multiplies by whole output projections of both models."""
    layout = run.layout
    split = next((name for name in ("zero", "tensor", "pipeline") if getattr(layout, name) > (name != "zero")), None)
    if not run.distills or split is None:
        return None
    return (
        f"distill.teacher compares whole logits on every rank, but layout.{split} is {getattr(layout, split)}; use "
        "layout.data alone"
    )


@rule(RUN_RULES, "distill.teacher", "levers.loss")
def distillation_is_fused(run: Run) -> str | None:
    if run.distills and run.levers.loss == "plain":
        return "levers.loss is plain, but distill.teacher has a fused loss of its own; set levers.loss=fused"
    return None


@rule(RUN_RULES, "distill.features", "levers.checkpoint_every")
def features_are_kept(run: Run) -> str | None:
    levers = run.levers
    recomputed = levers.checkpoint_every or levers.num_checkpoints or levers.checkpoint_budget_bytes is not None
    if run.compares_features and (recomputed or levers.tiles > 1):
        return (
            "distill.features compares hidden states of layers, but levers recompute or tile layers; keep all "
            "activations or set distill.features=0"
        )
    return None
