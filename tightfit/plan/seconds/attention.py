"""Attention: its pairs of tokens, and its tokens, which cost as much as so many keys each (hardware/efficiency.py).

Causal attention takes 4 × pairs × query width operations forward, and 2.5 times that backward, as flash attention
computes the scores again.
"""

from dataclasses import dataclass
from functools import cache

from tightfit.models.spec import ModelSpec
from tightfit.plan.seconds.rates import Rates

BACKWARD_WORK = 2.5


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Seconds in one layer, for one micro-batch on one rank."""

    forward_s: float
    backward_s: float


@cache
def attention_pairs(spec: ModelSpec, sequence_length: int) -> float:
    """Pairs (query, key) of one row in the average layer: T²/2, or less where layers look through a window."""
    full = sequence_length**2 / 2
    window = min(spec.window or sequence_length, sequence_length)
    windowed = window * sequence_length - window**2 / 2
    windowed_share = len(spec.window_layers) / spec.layers
    return windowed_share * windowed + (1 - windowed_share) * full


def layer_attention(
    spec: ModelSpec, rates: Rates, *, rows: int, sequence_length: int, tensor: int, context: int
) -> Attention:
    """Of `rows` rows; tensor ranks split heads, context ranks queries."""
    tokens = rows * sequence_length / context
    pairs = rows * attention_pairs(spec, sequence_length) / context
    pair_flops = 4 * spec.query_size / tensor
    forward_flops = pair_flops * (pairs + tokens * rates.forward_token_keys / 2)
    backward_flops = BACKWARD_WORK * pair_flops * (pairs + tokens * rates.backward_token_keys / 2)
    if rates.score_passes[0]:
        return _unfused(spec, rates, scores=tokens * sequence_length * spec.heads / tensor)
    return Attention(
        forward_s=forward_flops / rates.attention_forward_flop_s,
        backward_s=backward_flops / rates.attention_backward_flop_s,
    )


def _unfused(spec: ModelSpec, rates: Rates, *, scores: float) -> Attention:
    """All scores of all pairs, seen or not, computed by plain products and gone over in memory."""
    flops = 4 * scores * spec.head_dim
    forward_passes, backward_passes = rates.score_passes
    score_bytes = 2 * scores
    return Attention(
        forward_s=flops / rates.product_flop_s + forward_passes * score_bytes / rates.bytes_s,
        backward_s=2 * flops / rates.product_flop_s + backward_passes * score_bytes / rates.bytes_s,
    )
