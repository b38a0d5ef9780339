"""Parameters: how many weights the fullest rank holds, and how many of them it owns after ZeRO has split them."""

from dataclasses import dataclass
from functools import cache

from tightfit.jobs.layout import Layout
from tightfit.models.spec import ModelSpec


class ModelParams:
    """Parameter counts of a whole model, as the spec counts them."""

    def __init__(self, spec: ModelSpec) -> None:
        """Averages over all layers, which may differ."""
        experts = 0
        if spec.experts is not None:
            each_layer = spec.mlp_params(spec.experts.mlp_size) * spec.experts.count
            experts = each_layer * sum(spec.is_routed(layer) for layer in range(spec.layers))
        layers = sum(spec.layer_params(layer) for layer in range(spec.layers)) - experts
        self.layer = layers // spec.layers
        """One average layer without its experts."""
        self.layer_experts = experts // spec.layers
        self.ends = spec.embedding_params + spec.head_params + spec.norm_params
        """Embedding, head and last norm."""


model_params = cache(ModelParams)


@dataclass(frozen=True, kw_only=True)
class RankParams:
    """Parameter counts of the fullest pipeline rank, after tensor and expert ranks have split them."""

    dense: float
    owned: float
    """Parameters that this rank updates: all, or its ZeRO shard."""
    experts: float = 0.0
    root: float = 0.0
    """Embedding and head, part of `dense`: FSDP2's root, which stays gathered between forward and backward."""
    owned_embedding: float = 0.0
    owned_ends: float = 0.0
    """The owned parameters of the embedding, and of embedding and head."""

    @property
    def all(self) -> float:
        """Dense parameters and experts together."""
        return self.dense + self.experts

    @property
    def root_share(self) -> float:
        """The root's share of all parameters."""
        return self.root / self.all


def rank_params(spec: ModelSpec, layout: Layout, layers: int) -> RankParams:
    """Counts of a rank with `layers` layers; in a pipeline it has the embedding or the head, not both."""
    model = model_params(spec)
    either_end = max(spec.embedding_params, spec.vocabulary_params)
    ends = either_end if layout.pipeline > 1 else model.ends
    dense = (model.layer * layers + ends) / layout.weight_ranks
    experts = model.layer_experts * layers / layout.weight_ranks / layout.expert
    shards = layout.zero_ranks if layout.zero else 1
    expert_shards = max(1, shards // layout.expert) if layout.zero else 1
    owned = dense / shards + experts / expert_shards
    owned_share = owned / (dense + experts)
    all_ends = model.ends / layout.weight_ranks
    return RankParams(
        dense=dense,
        owned=owned,
        experts=experts,
        root=ends / layout.weight_ranks,
        owned_embedding=all_ends / (1 if spec.tied else 2) * owned_share,
        owned_ends=all_ends * owned_share,
    )
