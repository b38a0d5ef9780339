"""Distillation losses beside predictions and hidden states: the distance of attention maps, and a contrastive loss.

Attention maps are softmax(scale · q kᵀ) averaged over heads, so that student and teacher may have different numbers of
heads; their distance is KL(teacher ‖ student) of every query (as MiniLM, Wang et al. 2020). The maps are computed again
from queries and keys, as fused attention keeps none: B · heads · T² numbers of each compared layer.

The contrastive loss (InfoNCE, van den Oord et al. 2018; Tian et al. 2019 for distillation) pulls every student
embedding nearer to the teacher's of the same token than to those of other tokens of the micro-batch, of which at most
`MOST_CONTRASTED_TOKENS` take part, evenly spaced.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.models.decoder import Attention, ForwardContext

MOST_CONTRASTED_TOKENS = 512
TEMPERATURE = 0.1
SMALLEST = 1e-9


def attention_map(attention: Attention, x: Tensor, ctx: ForwardContext, documents: Tensor | None) -> Tensor:
    """Attention probabilities averaged over heads, [B, T, T] float32; rows sum to one."""
    query, key, _ = attention.heads(x, ctx)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = (query.float() @ key.float().transpose(-1, -2)) * attention.scale
    if attention.softcap is not None:
        scores = attention.softcap * torch.tanh(scores / attention.softcap)
    places = torch.arange(x.shape[1], device=x.device)
    distance = places[:, None] - places
    seen = (distance >= 0) & (distance < (attention.window or x.shape[1]))
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    return scores.masked_fill(~seen, -torch.inf).softmax(-1).mean(1)


def map_distance(student: Tensor, teacher: Tensor, counted: Tensor) -> Tensor:
    """Σ over counted queries of KL(teacher ‖ student)."""
    ratio = (teacher.clamp(min=SMALLEST) / student.clamp(min=SMALLEST)).log()
    return ((teacher * ratio).sum(-1) * counted).sum()


def contrastive_loss(student: Tensor, teacher: Tensor, counted: Tensor) -> Tensor:
    """InfoNCE of embeddings [B, T, H] of equal width, times the number of counted tokens."""
    places = counted.flatten().nonzero()[:, 0]
    places = places[:: max(len(places) // MOST_CONTRASTED_TOKENS, 1)][:MOST_CONTRASTED_TOKENS]
    if len(places) < 2:
        return student.sum() * 0.0
    mine, theirs = (F.normalize(x.flatten(0, 1)[places].float(), dim=-1) for x in (student, teacher))
    likeness = mine @ theirs.T / TEMPERATURE
    return F.cross_entropy(likeness, torch.arange(len(places), device=likeness.device)) * counted.sum()
