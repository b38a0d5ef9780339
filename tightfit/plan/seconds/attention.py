"""Attention: its pairs of tokens, and its tokens, which cost as much as so many keys each (hardware/efficiency.py).

Causal attention takes 4 × pairs × query width operations forward, and 2.5 times that backward, as flash attention
computes the scores again. Forward reads all keys and values of a head for each block of queries: what of them the L2
cache does not hold comes from memory again and again,

    missed = max(0, 1 − L2 / (4 bytes · length · head size))      forward · (1 + 0.22 · missed)

which is what rows of 131 072 to 524 288 tokens take on an H200 (long_attention.csv).
"""

from functools import cache

from tightfit.models.spec import ModelSpec
from tightfit.plan.seconds.passes import PassSeconds
from tightfit.plan.seconds.rates import AttentionRates, Rates

BACKWARD_WORK = 2.5
L2_BYTES = 50e6
"""An H100's and an H200's; cards of other generations have 6 to 128 MB."""
MISSED_MORE = 0.22


@cache
def attention_pairs(spec: ModelSpec, sequence_length: int) -> float:
    """Pairs (query, key) of one row in the average layer: T²/2, or less where layers look through a window."""
    full, windowed = sequence_length**2 / 2, _windowed_pairs(spec, sequence_length)
    windowed_share = len(spec.window_layers) / spec.layers
    return windowed_share * windowed + (1 - windowed_share) * full


def layer_attention(spec: ModelSpec, rates: Rates, *, tokens: float, sequence_length: int, tensor: int) -> PassSeconds:
    """Of one layer and `tokens` queries to their rows of `sequence_length`; tensor ranks split heads."""
    if rates.score_passes[0]:
        return _unfused(spec, rates, scores=tokens * sequence_length * spec.heads / tensor)
    pair_flops = 4 * spec.query_size / tensor
    missed = max(0.0, 1 - L2_BYTES / (4 * sequence_length * spec.head_dim))
    forward_s = backward_s = 0.0
    for share, row_pairs, kernel in _kernels(spec, rates, sequence_length):
        pairs = tokens / sequence_length * row_pairs
        forward_flops = pair_flops * (pairs + tokens * kernel.forward_token_keys / 2)
        backward_flops = BACKWARD_WORK * pair_flops * (pairs + tokens * kernel.backward_token_keys / 2)
        forward_s += share * forward_flops / kernel.forward_flop_s * (1 + MISSED_MORE * missed)
        backward_s += share * backward_flops / kernel.backward_flop_s
    return PassSeconds(forward_s, backward_s)


def _kernels(spec: ModelSpec, rates: Rates, sequence_length: int) -> list[tuple[float, float, AttentionRates]]:
    """Share of layers, pairs of one of their rows, and the kernel they take: windowed layers, and the others."""
    usual, own = rates.attention, rates.own_attention or rates.attention
    windowed_share = len(spec.window_layers) / spec.layers
    return [
        (windowed_share, _windowed_pairs(spec, sequence_length), own),
        (1 - windowed_share, sequence_length**2 / 2, own if spec.attention_softcap is not None else usual),
    ]


def _windowed_pairs(spec: ModelSpec, sequence_length: int) -> float:
    """Pairs of one row in a layer with the model's window."""
    window = min(spec.window or sequence_length, sequence_length)
    return window * sequence_length - window**2 / 2


def _unfused(spec: ModelSpec, rates: Rates, *, scores: float) -> PassSeconds:
    """All scores of all pairs, seen or not, computed by plain products and gone over in memory."""
    flops = 4 * scores * spec.head_dim
    forward_passes, backward_passes = rates.score_passes
    score_bytes = 2 * scores
    return PassSeconds(
        forward_s=flops / rates.product_flop_s + forward_passes * score_bytes / rates.bytes_s,
        backward_s=2 * flops / rates.product_flop_s + backward_passes * score_bytes / rates.bytes_s,
    )
