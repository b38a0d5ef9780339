"""Params: how many weights one rank holds of each part of the model, before data ranks split them.

Tensor ranks in a line split matrices and the vocabulary and replicate norms; where there are fewer key heads than
ranks, a head's projection is split over several ranks. Experts are split over `expert` data and context ranks. On a
mesh of side q (2D, 2.5D, 3D) a rank has matrices / (q² or q³) and vectors / q. Of a frozen model only the adapters'
weights count.
"""

from functools import lru_cache
from typing import NamedTuple

from tightfit.memory.formulas.local_shape import LocalShape, ceil
from tightfit.models.spec import ModelSpec


class Params(NamedTuple):
    """Dense weights, which all data ranks have, and experts' weights, which only some have."""

    dense: int = 0
    experts: int = 0

    @property
    def all(self) -> int:
        """Both together."""
        return self.dense + self.experts

    def plus(self, other: "Params", times: int = 1) -> "Params":
        """The sum of these and `times` the others."""
        return Params(self.dense + times * other.dense, self.experts + times * other.experts)

    def shard(self, ranks: int, expert: int) -> int:
        """Weights on one of `ranks`: dense ones are sharded over all, experts over the ranks that have the same."""
        return ceil(self.dense, ranks) + ceil(self.experts, max(1, ranks // expert))


@lru_cache(maxsize=4096)
def layer_params(shape: LocalShape, layer: int) -> Params:
    """Weights of one layer, with FSDP2's padding of a stack of experts."""
    spec = shape.spec
    if shape.adapted is not None:
        return Params(sum(shape.adapted.matrices(spec)))
    if shape.mesh_ranks:
        matrices = sum(_matrices(spec, layer, tensor=1, expert=1))
        vectors = spec.layer_params(layer) - matrices
        return Params(ceil(matrices, shape.mesh_ranks) + ceil(vectors, shape.tensor))
    norms = spec.norm_params * spec.norms_per_layer + spec.qk_norm_params
    dense = norms + _attention_params(spec, shape.tensor)
    if spec.experts is None or not spec.is_routed(layer):
        return Params(dense + shape.columns(spec.mlp_params(spec.mlp_size)))
    one_expert = shape.columns(spec.mlp_params(spec.experts.mlp_size))
    count = shape.padded_experts or shape.experts
    return Params(dense + shape.columns(spec.shared_params) + spec.router_params, count * one_expert)


def _attention_params(spec: ModelSpec, tensor: int) -> int:
    if spec.latent is not None:
        return spec.attention_params()  # not split over tensor ranks
    q, kv = ceil(spec.heads, tensor) * spec.head_dim, ceil(spec.kv_size, tensor)
    biases = (q + 2 * kv) * spec.qkv_bias + spec.hidden_size * spec.output_bias
    return spec.hidden_size * (2 * q + 2 * kv) + biases + ceil(spec.heads, tensor) * spec.sinks


def layer_matrices(shape: LocalShape, layer: int) -> tuple[int, ...]:
    """Sizes of a layer's larger matrices in the model's order: q, k, v, o, then the MLP's; experts are stacked."""
    if shape.adapted is not None:
        return shape.adapted.matrices(shape.spec)
    if shape.mesh_ranks:
        return tuple(ceil(size, shape.mesh_ranks) for size in _matrices(shape.spec, layer, tensor=1, expert=1))
    return _matrices(shape.spec, layer, shape.tensor, shape.expert)


def _matrices(spec: ModelSpec, layer: int, tensor: int, expert: int) -> tuple[int, ...]:
    hidden, latent = spec.hidden_size, spec.latent
    query, key = (hidden * ceil(heads, tensor) * spec.head_dim for heads in (spec.heads, spec.kv_heads))
    attention: tuple[int, ...] = (query, key, key, query)
    if latent is not None:  # queries (one matrix or two), kv_a, kv_b, o
        rank = latent.query_rank
        queries = (hidden * rank, rank * spec.query_size) if rank else (hidden * spec.query_size,)
        kv_a, kv_b = hidden * (latent.kv_rank + latent.rope_dim), latent.kv_rank * spec.latent_columns
        attention = (*queries, kv_a, kv_b, spec.output_size * hidden)
    inner = hidden * ceil(spec.mlp_size, tensor)
    if spec.is_routed(layer) and spec.experts is not None:
        inner = ceil(spec.experts.count, expert) * hidden * ceil(spec.experts.mlp_size, tensor)
    return (*attention, *(inner,) * (spec.up_projections + 1))


def vocabulary_params(shape: LocalShape) -> int:
    """Weights of the embedding, or of the output projection; 0 where the model is frozen."""
    if shape.adapted is not None:
        return 0
    if shape.mesh_ranks:
        return ceil(shape.spec.vocabulary_params, shape.mesh_ranks)
    return shape.columns(shape.spec.vocab_size) * shape.spec.hidden_size


def embedding_params(shape: LocalShape) -> int:
    """Weights before the first layer: of tokens and of learned positions; 0 where the model is frozen."""
    spec = shape.spec
    positions = spec.max_positions * spec.hidden_size if spec.rope is None and shape.adapted is None else 0
    return vocabulary_params(shape) + (shape.columns(positions) if shape.mesh_ranks else positions)
