"""Params: how many weights one rank holds of each part of the model, before data ranks split them.

Tensor ranks split matrices and the vocabulary and repeat norms; experts are split over `expert` data and context ranks.
Where there are fewer key heads than tensor ranks, their projections are cut inside a head.
"""

from functools import lru_cache
from typing import NamedTuple

from tightfit.memory.formulas.share import ceil
from tightfit.models.spec import ModelSpec


class Params(NamedTuple):
    """Weights that all data ranks have, and weights of the experts that only some have."""

    dense: int
    experts: int

    @property
    def all(self) -> int:
        """Both."""
        return self.dense + self.experts

    def plus(self, other: "Params", times: int = 1) -> "Params":
        """These and `times` the others."""
        return Params(self.dense + times * other.dense, self.experts + times * other.experts)

    def shard(self, ranks: int, expert: int) -> int:
        """What one of `ranks` holds when dense weights are split over all and experts over those that share them."""
        return ceil(self.dense, ranks) + ceil(self.experts, ranks // expert)


NOTHING = Params(0, 0)


@lru_cache(maxsize=4096)
def layer_params(spec: ModelSpec, layer: int, tensor: int = 1, expert: int = 1) -> Params:
    """Of one layer."""
    norms = spec.norm_params * (4 if spec.sandwich_norms else 2) + 2 * spec.head_dim * spec.qk_norm
    dense = norms + _attention(spec, tensor)
    if not spec.is_routed(layer):
        return Params(dense + ceil(spec.mlp_params(spec.mlp_size), tensor), 0)
    experts = spec.experts
    assert experts is not None
    shared = spec.mlp_params(experts.shared_size) + spec.hidden_size if experts.shared_size else 0
    dense += ceil(shared, tensor) + spec.hidden_size * experts.count
    return Params(dense, ceil(experts.count, expert) * ceil(spec.mlp_params(experts.mlp_size), tensor))


def _attention(spec: ModelSpec, tensor: int) -> int:
    h, q, kv = spec.hidden_size, ceil(spec.heads, tensor) * spec.head_dim, ceil(spec.kv_size, tensor)
    return h * (2 * q + 2 * kv) + (q + 2 * kv) * spec.qkv_bias + h * spec.output_bias


def embedding_params(spec: ModelSpec, tensor: int = 1) -> int:
    """Before the first layer."""
    positions = spec.max_positions * spec.hidden_size if spec.rope is None else 0
    return ceil(spec.vocab_size, tensor) * spec.hidden_size + positions


def vocabulary_params(spec: ModelSpec, tensor: int = 1) -> int:
    """Of an embedding, or of an output projection."""
    return ceil(spec.vocab_size, tensor) * spec.hidden_size


def largest_in_layer(spec: ModelSpec, layer: int, tensor: int = 1, expert: int = 1) -> int:
    """The largest single parameter of a layer: experts are stacked into one."""
    if spec.is_routed(layer) and spec.experts is not None:
        return ceil(spec.experts.count, expert) * ceil(spec.experts.mlp_size, tensor) * spec.hidden_size
    return spec.hidden_size * max(ceil(spec.mlp_size, tensor), ceil(spec.heads, tensor) * spec.head_dim)
