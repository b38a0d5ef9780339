"""One step of serving, and the counts of weights and elements from which its time on a device is predicted."""

from dataclasses import dataclass

from tightfit.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Step:
    """One forward pass over `tokens` tokens of prefill and decode; `answers` sequences sample their next token."""

    tokens: int
    answers: int
    pairs: float
    """Pairs of a query and a visible key, in prefill."""
    cache_bytes: float
    """Keys and values read from the cache."""


def layer_params(spec: ModelSpec) -> int:
    """Weights of the layers that a token is multiplied by."""
    return spec.params(active=True) - spec.vocabulary_params - spec.head_params


def moved_elements(spec: ModelSpec) -> int:
    """Numbers per token that a layer's norms, rope and activations read and write."""
    return 10 * spec.hidden_size + 2 * spec.query_size + 4 * spec.kv_size + 4 * spec.mlp_size


def expert_params(spec: ModelSpec) -> int:
    """Weights of one expert; 0 of a dense model."""
    return 0 if spec.experts is None else (spec.up_projections + 1) * spec.hidden_size * spec.experts.mlp_size


def experts_met(spec: ModelSpec, tokens: int) -> float:
    """Expected experts of a routed layer that T tokens are routed to, if all are equally likely: E (1 − (1 − k/E)ᵀ)."""
    assert spec.experts is not None
    count = spec.experts.count
    return count * (1 - (1 - spec.experts.per_token / count) ** tokens)
