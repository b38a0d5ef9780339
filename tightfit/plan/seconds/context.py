"""Context ranks: seconds that the exchange of heads and the ring add to a layer beside attention.

Exchange of heads (parallel/head_exchange.py, Ulysses): two all-to-alls, one of queries, keys and values and one of
outputs, which compute waits for, and the copies that sort heads by rank and tokens by row; backward takes as much.

Ring (parallel/ring.py): each of r ranks keeps its queries and receives all others' keys and values in r − 1 sends, the
first while the rank attends to its own (Liu et al. 2023). So they overlap with all of attention but one r-th, and slow
the compute that they overlap with. Backward sends keys and values, and their gradients in float32. Attention to each
received part is a kernel of its own, whose results are added into float32 sums: outputs in forward, gradients of
queries, keys and values in backward. As rows are dealt out from both ends, half of the received parts concern only the
later half of the queries, the others only the earlier half of the keys: three quarters of a merge on average. Not
counted: attention to short parts is less efficient.
"""

from dataclasses import dataclass

from tightfit.jobs.layout import Layout
from tightfit.jobs.precision import FLOAT32_BYTES
from tightfit.jobs.workload import Workload
from tightfit.plan.seconds.cost_context import CostContext
from tightfit.plan.seconds.layer import LayerTime
from tightfit.plan.seconds.passes import PassSeconds, with_contention_s

MERGE_BYTES = 2 * 4 + 2
"""Bytes per number that is merged: the sum read and written in float32, and the addend in 16 bits."""
MERGED_SHARE = 3 / 4


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The ring in one layer for one micro-batch."""

    ranks: int
    send_s: float
    """Keys and values, to the next rank."""
    gradient_send_s: float
    """Their gradients, to the next rank."""
    query_numbers: float
    key_numbers: float
    """Numbers of keys and values together."""
    bytes_s: float

    def forward_s(self, attention_s: float) -> float:
        """Seconds beside attention's forward."""
        return self._sent_s(self.send_s, attention_s) + self._merged_s(self.query_numbers)

    def backward_s(self, attention_s: float) -> float:
        """Seconds beside attention's backward."""
        sent_s = self._sent_s(self.send_s + self.gradient_send_s, attention_s)
        return sent_s + self._merged_s(self.query_numbers + self.key_numbers)

    def _sent_s(self, one_send_s: float, attention_s: float) -> float:
        traffic_s = (self.ranks - 1) * one_send_s
        hiding_s = attention_s * (self.ranks - 1) / self.ranks
        return with_contention_s(traffic_s, max(0.0, traffic_s - hiding_s))

    def _merged_s(self, numbers: float) -> float:
        return (self.ranks - 1) * MERGED_SHARE * numbers * MERGE_BYTES / self.bytes_s


def exchanged_numbers(workload: Workload, layout: Layout, tokens: float) -> tuple[float, float]:
    """Numbers of a rank in one layer: of queries (and as many of outputs), and of keys and values together; with fewer
    key heads than ranks, each rank gets one, so copies are counted."""
    spec, heads_ranks = workload.spec, layout.tensor_axes[2]
    own_tokens = tokens / layout.row_parts
    kv_heads = max(spec.kv_heads / heads_ranks, layout.ulysses_ranks)
    return own_tokens * spec.query_size / heads_ranks, own_tokens * 2 * kv_heads * spec.head_dim


def layer_context_s(ctx: CostContext, layout: Layout, layer: LayerTime) -> PassSeconds:
    """Seconds of one layer's exchange of heads and ring."""
    exchange_s, ring = head_exchange_s(ctx, layout, layer.tokens), context_ring(ctx, layout, layer.tokens)
    return PassSeconds(
        exchange_s + ring.forward_s(layer.attention.forward_s), exchange_s + ring.backward_s(layer.attention.backward_s)
    )


def head_exchange_s(ctx: CostContext, layout: Layout, tokens: float) -> float:
    """Seconds of the exchange of heads for `tokens` tokens in forward; backward takes as much."""
    if layout.ulysses_ranks == 1:
        return 0.0
    query_numbers, key_numbers = exchanged_numbers(ctx.workload, layout, tokens)
    ranks = ctx.group(layout.tensor, layout.ulysses_ranks)
    qkv_bytes = (query_numbers + key_numbers) * ctx.workload.weight_bytes
    out_bytes = query_numbers * ctx.workload.weight_bytes
    sent_s = ranks.all_to_all_s(qkv_bytes) + ranks.all_to_all_s(out_bytes)
    sorted_bytes = 2 * (qkv_bytes + out_bytes)  # read and written
    return sent_s + sorted_bytes / ctx.rates.bytes_s


def context_ring(ctx: CostContext, layout: Layout, tokens: float) -> Ring:
    """The ring of context ranks, each with `tokens` tokens."""
    query_numbers, key_numbers = exchanged_numbers(ctx.workload, layout, tokens)
    ranks = ctx.group(layout.tensor * layout.ulysses_ranks, layout.ring)
    return Ring(
        ranks=layout.ring,
        send_s=ranks.send_s(key_numbers * ctx.workload.weight_bytes),
        gradient_send_s=ranks.send_s(key_numbers * FLOAT32_BYTES),
        query_numbers=query_numbers,
        key_numbers=key_numbers,
        bytes_s=ctx.rates.bytes_s,
    )
