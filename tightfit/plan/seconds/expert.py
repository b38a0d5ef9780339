"""Traffic of expert ranks: two all-to-alls per routed layer and pass, dispatch of tokens to experts and combine."""

from tightfit.jobs.layout import Layout
from tightfit.plan.seconds.cost_context import CostContext
from tightfit.plan.seconds.products import routed_share


def expert_one_way_s(ctx: CostContext, layout: Layout, *, layers: int, hidden_bytes: float) -> float:
    """Seconds of `layers` layers' forward, and of their backward, that the engine does not hide; each token's hidden
    state goes to several experts."""
    spec, engine = ctx.workload.spec, ctx.workload.engine
    if spec.experts is None or layout.expert == 1:
        return 0.0
    ranks = ctx.group(layout.tensor, layout.expert)
    sent_s = 2 * layers * routed_share(spec) * ranks.all_to_all_s(hidden_bytes * spec.experts.computed_per_token)
    return (1 - engine.expert_hidden_share) * sent_s
