"""Settings that context ranks do not go with."""

from typing import TYPE_CHECKING

from tightfit.jobs.rules.rule import LAYOUT_RULES, RUN_RULES, Run, rule
from tightfit.jobs.rules.shapes import indivisible, unshared_heads, unshared_rows
from tightfit.jobs.rules.tensor_mesh import indivisible_blocks

if TYPE_CHECKING:
    from tightfit.jobs.layout import Layout


@rule(LAYOUT_RULES, "ring", "context")
def a_ring_is_of_context_ranks(layout: "Layout") -> str | None:
    if layout.context % layout.ring:
        return (
            f"layout.ring is {layout.ring}, which does not divide the {layout.context} context ranks; give a divisor, "
            "or 1 to exchange heads alone"
        )
    return None


@rule(RUN_RULES, "layout.context", "layout.ring", "layout.tensor", "layout.tensor_mesh", "model")
def context_ranks_share_heads(run: Run) -> str | None:
    layout, spec = run.layout, run.spec
    if spec is None or layout.ulysses_ranks == 1:
        return None
    side = layout.tensor_axes[2]  # tensor ranks that share heads
    if layout.tensor_mesh == "1d" and indivisible(spec, side):  # refused by tensor.py, and on meshes by tensor_mesh.py
        return None
    if layout.tensor_mesh != "1d" and indivisible_blocks(spec, layout.tensor_mesh, side):
        return None
    return unshared_heads(spec, side, layout.ulysses_ranks, layout.context)


@rule(RUN_RULES, "layout.context", "layout.ring", "data.sequence_length")
def context_ranks_share_rows(run: Run) -> str | None:
    if run.sequence_length is None or run.layout.context == 1:
        return None
    return unshared_rows(run.sequence_length, run.layout.context, run.layout.ring)


@rule(RUN_RULES, "experts.capacity_factor", "layout.context")
def capacities_are_of_whole_rows(run: Run) -> str | None:
    limited = run.spec is not None and run.spec.experts is not None and run.spec.experts.capacity_factor is not None
    if limited and run.layout.context > 1:
        return (
            f"experts.capacity_factor counts the tokens of whole rows, but layout.context is {run.layout.context}, "
            "whose ranks have pieces of them; drop one of the two"
        )
    return None


@rule(RUN_RULES, "distill.teacher", "layout.context")
def a_teacher_gets_whole_rows(run: Run) -> str | None:
    if run.distills and run.layout.context > 1:
        return (
            "distill.teacher compares the logits of whole rows on every rank, but layout.context is "
            f"{run.layout.context}; use layout.data alone"
        )
    return None
