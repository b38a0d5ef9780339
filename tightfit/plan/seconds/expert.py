"""Traffic of expert ranks: two all-to-alls per routed layer and pass, dispatch of tokens to experts and combine."""

from tightfit.models.spec import ModelSpec
from tightfit.plan.seconds.groups import Group
from tightfit.plan.seconds.products import routed_share


def expert_one_way_s(group: Group, spec: ModelSpec, *, layers: int, hidden_bytes: float) -> float:
    """Seconds of `layers` layers' forward, and of their backward; each token's hidden state goes to several experts."""
    if spec.experts is None or group.size == 1:
        return 0.0
    sent_s = group.all_to_all_s(hidden_bytes * spec.experts.computed_per_token)
    return 2 * layers * routed_share(spec) * sent_s
