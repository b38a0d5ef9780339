"""Routing: which experts every token goes to, and how much each counts.

Scores are a softmax over all experts or a sigmoid of each, in float32. A token's experts are the top k: of all, or of
the groups that score highest (DeepSeek-V2: by their best expert; V3: by the sum of their best two). Where the family
corrects (V3, Wang et al. 2024, "Auxiliary-loss-free load balancing"), experts are ranked by score + bias, and weighed
by their score alone: the bias says how often an expert is chosen, never how much it counts, and has no gradient.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.models.spec import Experts, Score

LEAST_SUM = 1e-20
"""Added to the sum that sigmoid weights are divided by, as DeepSeek-V3 does; all of them may be 0."""


def scored(logits: Tensor, score: Score) -> Tensor:
    """Scores [N, E] of the router's logits, float32."""
    if score == "sigmoid":
        return logits.float().sigmoid()
    return F.softmax(logits, dim=-1, dtype=torch.float32)


def z_loss(logits: Tensor) -> Tensor:
    """The mean over tokens of logsumexp(logits)² (Zoph et al. 2022, ST-MoE, eq. 5): keeps logits [N, E] small."""
    return logits.float().logsumexp(-1).square().mean()


def choose(scores: Tensor, experts: Experts, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Weights and indices of every token's experts, [N, k] each."""
    if correction is None and experts.groups == 1:
        weights, chosen = scores.topk(experts.per_token, dim=-1)
    else:
        chosen = _rank(scores.detach(), experts, correction).topk(experts.per_token, dim=-1).indices
        weights = scores.gather(1, chosen)
    if experts.normalise:
        least = LEAST_SUM if experts.score == "sigmoid" else 0.0
        weights = weights / (weights.sum(-1, keepdim=True) + least if least else weights.sum(-1, keepdim=True))
    return weights * experts.scale if experts.scale != 1.0 else weights, chosen


def _rank(scores: Tensor, experts: Experts, correction: Tensor | None) -> Tensor:
    """The scores by which experts are chosen, [N, E]; −∞ in groups that are not chosen."""
    ranked = scores if correction is None else scores + correction.float()
    if experts.groups == 1:
        return ranked
    by_group = ranked.unflatten(-1, (experts.groups, -1))  # [N, groups, experts of one]
    best = by_group.amax(-1) if correction is None else by_group.topk(2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(experts.chosen_groups, dim=-1).indices, True)
    return by_group.masked_fill(~kept[..., None], -torch.inf).flatten(1)
