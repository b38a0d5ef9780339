"""Traffic of tensor ranks: the collectives of a micro-batch, each over tokens × hidden size (parallel/tensor.py).

With the residual stream whole on every rank, a block (attention or MLP) ends with an all-reduce in forward and begins
with one in backward; the embedding and the hidden states of the loss add one each. With sequence parallelism each
all-reduce becomes a reduce-scatter and an all-gather, and backward gathers each block's input once more. A recomputed
layer repeats its forward without the last all-reduce, which nothing in backward needs, and its all-gathers serve
backward as well. Not counted: the loss gathers four numbers per row from each rank, and once a step the gradients of
norms are summed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tightfit.jobs.layout import Layout
from tightfit.plan.seconds.cost_context import CostContext


class TensorCalls(NamedTuple):
    """Collectives over tokens × hidden size of one micro-batch."""

    all_reduces: int = 0
    all_gathers: int = 0
    reduce_scatters: int = 0


def forward_calls(layers: int, *, sequence_parallel: bool, ends: int = 1) -> TensorCalls:
    """Collectives of a forward pass; backward has as many, besides `regather_calls`. `ends` is 1 for the embedding and
    the loss together, 0 without them."""
    pairs = 2 * layers + ends
    return TensorCalls(all_gathers=pairs, reduce_scatters=pairs) if sequence_parallel else TensorCalls(pairs)


def recompute_calls(layers: int, *, sequence_parallel: bool) -> TensorCalls:
    """Collectives of recomputing layers."""
    twice = 2 * layers
    return TensorCalls(all_gathers=twice, reduce_scatters=twice) if sequence_parallel else TensorCalls(layers)


def regather_calls(layers: int, *, sequence_parallel: bool) -> TensorCalls:
    """All-gathers of the blocks' inputs for backward, one block ahead of it so that they overlap."""
    return TensorCalls(all_gathers=2 * layers if sequence_parallel else 0)


@dataclass(frozen=True, kw_only=True)
class TensorTraffic:
    """Seconds of one micro-batch on the pipeline rank with most layers."""

    one_way_s: float
    """Collectives of forward, or of backward: as much."""
    recompute_s: float
    """Collectives of recomputing all layers."""
    regather_s: float
    """All-gathers of all blocks' inputs for backward, before overlap."""
    once_s: float = 0.0
    """Sum of gradients over a 2.5D mesh's copies, once a step."""


def shared_ends(layout: Layout, layer_counts: Sequence[int]) -> float:
    """Share of the collectives of embedding and loss on the pipeline rank with most layers: 1 without a pipeline, else
    ½ if it is an end of the pipeline, 0 if not."""
    has_an_end = max(layer_counts) in (layer_counts[0], layer_counts[-1])
    return 1.0 if layout.pipeline == 1 else 0.5 * has_an_end


def tensor_traffic(ctx: CostContext, layout: Layout, layer_counts: Sequence[int], *, tokens: float) -> TensorTraffic:
    """Traffic of the rank with most of `layer_counts`, for micro-batches of `tokens` tokens."""
    layers, split, ranks = max(layer_counts), layout.sequence_parallel, ctx.group(1, layout.tensor)
    hidden_bytes = tokens * ctx.workload.spec.hidden_size * ctx.workload.weight_bytes
    reduce_s, gather_s = ranks.all_reduce_s(hidden_bytes), ranks.all_gather_s(hidden_bytes)

    def seconds(calls: TensorCalls) -> float:
        return calls.all_reduces * reduce_s + (calls.all_gathers + calls.reduce_scatters) * gather_s

    inside_s = seconds(forward_calls(layers, sequence_parallel=split, ends=0))
    both_ends_s = seconds(forward_calls(0, sequence_parallel=split))
    return TensorTraffic(
        one_way_s=inside_s + shared_ends(layout, layer_counts) * both_ends_s,
        recompute_s=seconds(recompute_calls(layers, sequence_parallel=split)),
        regather_s=seconds(regather_calls(layers, sequence_parallel=split)),
    )
