"""Attention: FLOPs of its pairs of tokens, and a fixed cost per token, as a number of keys (hardware/efficiency.py).

Causal attention takes 4 × pairs × query width FLOPs forward, and 2.5 times that backward: five products instead of two,
as flash attention recomputes the scores. Forward reads all keys and values of a head for each block of queries; the
share of them that does not fit the L2 cache is read from memory every time, which costs up to 22 %:

    missed = max(0, 1 − L2 / (4 bytes · length · head size))      forward · (1 + 0.22 · missed)

fitted to rows of 131 072 to 524 288 tokens on an H200 (long_attention.csv).
"""

from functools import cache

from tightfit.models.spec import ModelSpec
from tightfit.plan.seconds.cost_context import CostContext
from tightfit.plan.seconds.passes import PassSeconds
from tightfit.plan.seconds.rates import Rates

BACKWARD_WORK = 2.5
UNFUSED_SCORE_PASSES = 10.0, 14.0
"""Passes over the score matrix without a flash kernel, forward and backward: written, masked, softmax, dropout, read by
the next product; backward the same with gradients."""
L2_BYTES = 50e6
"""L2 cache of an H100 and an H200; cards of other generations have 6 to 128 MB."""
MISSED_MORE = 0.22


@cache
def attention_pairs(spec: ModelSpec, sequence_length: int) -> float:
    """Pairs (query, key) of one row in the average layer: T²/2, fewer in layers with a window."""
    return sum(share * pairs for share, pairs in _row_pairs(spec, sequence_length))


@cache
def _row_pairs(spec: ModelSpec, sequence_length: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """(share of layers, pairs of one row) of layers with the model's window, and of the others."""
    window = min(spec.window or sequence_length, sequence_length)
    windowed_share = len(spec.window_layers) / spec.layers
    windowed_pairs = window * sequence_length - window**2 / 2
    return (windowed_share, windowed_pairs), (1 - windowed_share, sequence_length**2 / 2)


def layer_attention(ctx: CostContext, *, tokens: float, tensor: int) -> PassSeconds:
    """Attention of one layer for `tokens` queries; tensor ranks split heads."""
    spec, rates, sequence_length = ctx.workload.spec, ctx.rates, ctx.workload.sequence_length
    if ctx.workload.engine.attention == "unfused":
        return _unfused(spec, rates, scores=tokens * sequence_length * spec.heads / tensor)
    pair_flops = 4 * spec.query_size / tensor
    missed = max(0.0, 1 - L2_BYTES / (4 * sequence_length * spec.head_dim))
    forward_s = backward_s = 0.0
    own, usual = rates.own_attention, rates.attention
    kernels = own, usual if spec.attention_softcap is None else own
    for kernel, (share, row_pairs) in zip(kernels, _row_pairs(spec, sequence_length), strict=True):
        pairs = tokens / sequence_length * row_pairs
        forward_flops = pair_flops * (pairs + tokens * kernel.forward_token_keys / 2)
        backward_flops = BACKWARD_WORK * pair_flops * (pairs + tokens * kernel.backward_token_keys / 2)
        forward_s += share * forward_flops / kernel.forward_flop_s * (1 + MISSED_MORE * missed)
        backward_s += share * backward_flops / kernel.backward_flop_s
    return PassSeconds(forward_s, backward_s)


def _unfused(spec: ModelSpec, rates: Rates, *, scores: float) -> PassSeconds:
    """Attention without a flash kernel: plain products over all pairs, masked ones too, and passes over the scores."""
    flops = 4 * scores * spec.head_dim
    forward_passes, backward_passes = UNFUSED_SCORE_PASSES
    score_bytes = 2 * scores
    return PassSeconds(
        forward_s=flops / rates.product_flop_s + forward_passes * score_bytes / rates.bytes_s,
        backward_s=2 * flops / rates.product_flop_s + backward_passes * score_bytes / rates.bytes_s,
    )
