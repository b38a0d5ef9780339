"""Traffic of expert ranks: tokens on their way to experts and back, two all-to-alls a routed layer and direction."""

from tightfit.models.spec import ModelSpec
from tightfit.plan.seconds.groups import Group
from tightfit.plan.seconds.products import routed_share


def expert_one_way_s(group: Group, spec: ModelSpec, *, layers: int, hidden_bytes: float) -> float:
    """Of `layers` layers' forward, and as much of backward; each token's hidden state goes to several experts."""
    if spec.experts is None or group.size == 1:
        return 0.0
    sent_s = group.all_to_all_s(hidden_bytes * spec.experts.computed_per_token)
    return 2 * layers * routed_share(spec) * sent_s
