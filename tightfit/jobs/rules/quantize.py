"""Settings that quantization-aware training does not go with."""

from math import gcd

from tightfit.jobs.lever_table import with_own_products
from tightfit.jobs.rules.rule import RUN_RULES, Run, rule

CUT_WEIGHTS = ("tensor", "pipeline")
"""Splits whose ranks have parts of a linear layer, or only some of the layers."""


@rule(RUN_RULES, "quantize.bits", "layout", "levers")
def rounded_weights_are_whole(run: Run) -> str | None:
    """Quantization groups divide whole rows, and some levers replace products or weights (jobs/lever_table.py)."""
    if run.rounding is None:
        return None
    splits = (("layout", name, degree, 1) for name, degree in run.layout.splits.items() if name in CUT_WEIGHTS)
    levers = (("levers", row.name, value, plain) for row, value, plain in with_own_products(run.levers))
    for section, name, value, fix in (*splits, *levers):
        what = f"{section}.{name} is {value}"
        return f"quantize.bits rounds whole weights of linear layers in forward, but {what}; set {section}.{name}={fix}"
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
    fits = next((group for group in (128, 64, 32, 16, *range(8, 128)) if gcd(*sizes) % group == 0), None)
    fix = "rows have no groups of 8 weights or more in common; drop it" if fits is None else f"take {fits}"
    return f"quantize.group is {run.rounding.group}, but rows of {odd} weights are no whole groups; {fix}"
