"""Settings that adapters on a frozen model do not go with."""

from tightfit.jobs.projections import linear_shapes
from tightfit.jobs.rules.rule import DEEPSPEED_RULES, RUN_RULES, Run, rule

TRAINED = "adapter.rank trains small matrices on a frozen model"


@rule(RUN_RULES, "adapter.rank", "layout")
def frozen_weights_are_whole(run: Run) -> str | None:
    """Every data rank has the whole model; gradients of adapters are all-reduced by DDP."""
    if run.adapted is None:
        return None
    if run.layout.zero:
        return f"{TRAINED} that every rank holds whole, but layout.zero is {run.layout.zero}; set it to 0"
    for name, degree in run.layout.splits.items():
        return f"{TRAINED} that every rank holds whole, but layout.{name} is {degree}; set it to 1 and use layout.data"
    return None


@rule(RUN_RULES, "adapter.rank", "levers.matmul")
def frozen_weights_have_no_fp8_codes(run: Run) -> str | None:
    if run.adapted is not None and run.levers.matmul != "native":
        return f"{TRAINED}, whose products are its own, but levers.matmul is {run.levers.matmul}; set it to native"
    return None


@rule(RUN_RULES, "adapter.rank", "levers.update_in_backward")
def adapters_are_updated_after_backward(run: Run) -> str | None:
    if run.adapted is not None and run.levers.update_in_backward:
        return f"{TRAINED}, whose gradients are small, but levers.update_in_backward is set; leave it out"
    return None


@rule(RUN_RULES, "adapter.rank", "levers.checkpoint_keep")
def frozen_products_are_not_kept(run: Run) -> str | None:
    """A product and the adapter's part are summed in one tensor, so the product alone cannot be kept."""
    if run.adapted is not None and run.levers.checkpoint_keep == "matmuls":
        return f"{TRAINED}, whose products are computed again, but levers.checkpoint_keep is matmuls; take attention"
    return None


@rule(RUN_RULES, "adapter.rank", "distill.teacher", "quantize.bits")
def adapters_learn_from_data(run: Run) -> str | None:
    other = "quantize.bits" if run.rounding is not None else "distill.teacher" if run.distills else None
    return None if run.adapted is None or other is None else f"{TRAINED}, but {other} is for models; drop one of them"


@rule(RUN_RULES, "adapter.rank", "model")
def adapters_are_of_dense_layers(run: Run) -> str | None:
    if run.adapted is None or run.spec is None or (run.spec.experts is None and run.spec.latent is None):
        return None
    return f"{TRAINED} of dense layers, but {run.spec.family} has experts or latent attention; choose another model"


@rule(RUN_RULES, "adapter.bits", "model")
def held_rows_are_whole_groups(run: Run) -> str | None:
    scheme = None if run.adapted is None else run.adapted.base.scheme
    if scheme is None or run.spec is None or scheme.group <= 0:
        return None
    odd = next((inputs for _, inputs in linear_shapes(run.spec).values() if inputs % scheme.group), None)
    if odd is None:
        return None
    return f"adapter.bits holds weights in groups of {scheme.group}, but the model has rows of {odd}; drop it"


@rule(DEEPSPEED_RULES, "adapter.rank")
def deepspeed_has_no_adapters(run: Run) -> str | None:
    if run.adapted is not None:
        return "adapter.rank is trained by tightfit's own engine, but engine is deepspeed; set it to tightfit"
    return None
