"""One step of serving, and what of a model it multiplies by and moves: what devices' times are counted from."""

from dataclasses import dataclass

from tightfit.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Step:
    """One forward pass: `tokens` in all, of which `answers` are asked for the next one."""

    tokens: int
    answers: int
    pairs: float
    """Of a query and a key that it sees, within prompts of the step."""
    cache_bytes: float
    """Keys and values that are read."""


def layer_params(spec: ModelSpec) -> int:
    """Weights of the layers that a token is multiplied by."""
    return spec.params(active=True) - spec.vocabulary_params - spec.head_params


def moved_elements(spec: ModelSpec) -> int:
    """Numbers of a token that a layer's norms, rotary positions and activations read and write."""
    return 10 * spec.hidden_size + 2 * spec.query_size + 4 * spec.kv_size + 4 * spec.mlp_size


def expert_params(spec: ModelSpec) -> int:
    """Weights of one expert; 0 of a dense model."""
    return 0 if spec.experts is None else (spec.up_projections + 1) * spec.hidden_size * spec.experts.mlp_size


def experts_met(spec: ModelSpec, tokens: int) -> float:
    """Experts of a routed layer that so many tokens go to, if all are as likely: E (1 − (1 − k/E)ᵀ)."""
    assert spec.experts is not None
    count = spec.experts.count
    return count * (1 - (1 - spec.experts.per_token / count) ** tokens)
