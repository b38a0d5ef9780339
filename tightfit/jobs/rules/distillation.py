"""Settings that a teacher does not go with."""

from tightfit.jobs.lever_table import recomputes
from tightfit.jobs.rules.rule import RUN_RULES, Run, rule


@rule(RUN_RULES, "distill.teacher", "layout")
def a_student_is_whole(run: Run) -> str | None:
    """The distillation loss multiplies by the whole output projections of both models."""
    layout = run.layout
    split = next((name for name in ("zero", "tensor", "pipeline") if getattr(layout, name) > (name != "zero")), None)
    if not run.distills or split is None:
        return None
    return (
        f"distill.teacher compares whole logits on every rank, but layout.{split} is {getattr(layout, split)}; use "
        "layout.data alone"
    )


@rule(RUN_RULES, "distill.features", "levers")
def features_are_kept(run: Run) -> str | None:
    if run.compares_features and recomputes(run.levers):
        return (
            "distill.features compares hidden states of layers, but levers recompute or tile layers; keep all "
            "activations or set distill.features=0"
        )
    return None
