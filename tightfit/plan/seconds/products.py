"""Matrix products of a layer and of the output projection.

    t = fixed + 2 m k n / rate        y [m, n] = x [m, k] Wᵀ

Both constants are fitted to 72 products of 512 to 4096 columns (benchmarks/calibrate.py), with an error of 6 % on
average. The fixed part is the ramp-up and drain of the card: a third of the time of a product of 2048 tokens and 1024
columns, nothing of a large one. No product takes less than reading its weights. Backward has two per product.
Tensor ranks split each evenly (Shoeybi et al. 2019). Of experts, the weights that a token is multiplied by count.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from tightfit.jobs.lever_table import LOSS_CHUNK_BYTES
from tightfit.levers.policy.loss_chunks import chunk_rows, padded
from tightfit.models.spec import Latent, ModelSpec
from tightfit.plan.seconds.cost_context import CostContext

TILE = 128, 256
"""Rows and columns of the output tile of one multiprocessor (Hopper's large tiles)."""
GROUP_ROWS = 100
"""Further rows that each expert's group costs in a grouped product, as its last tile is partly empty."""
GROUP_DEPTH = 150
"""Further terms of the sum (K) that each tile of a grouped product costs: its prologue and epilogue. With both, 128
experts of 512 rows, 64 of 1 024 and 8 of 2 048 are predicted as measured (calibration.csv, "grouped product")."""
MULTIPROCESSORS = 132
"""Of an H100 and an H200; cards of other generations have 80 to 150."""
LEAST_FILLED = 0.33
"""The least share of busy multiprocessors: with few tiles cuBLAS uses split-K (family_truth.csv: 640 to 1 152
columns)."""


@dataclass(frozen=True)
class Linear:
    """`count` products of x [tokens, inputs] with weights [outputs, inputs]."""

    inputs: float
    outputs: float
    count: int = 1

    @property
    def weights(self) -> float:
        """Weights of all `count` matrices."""
        return self.count * self.inputs * self.outputs


class Linears(NamedTuple):
    """The linear layers of one layer, averaged over those of a model."""

    queries: Linear
    keys_values: Linear
    output: Linear
    up: Linear
    """Up projection, and the gate where there is one."""
    down: Linear

    @property
    def weights(self) -> float:
        """Weights that multiply each token."""
        return sum(linear.weights for linear in self)


@cache
def layer_linears(spec: ModelSpec) -> Linears:
    """The linear layers of the average layer of `spec`."""
    hidden, columns = spec.hidden_size, mlp_columns(spec)
    query_columns, key_columns = spec.query_size, spec.kv_size
    if spec.latent is not None:  # one product with as many FLOPs as the down- and the up-projection together
        query_columns, key_columns = _latent_columns(spec, spec.latent)
    return Linears(
        queries=Linear(hidden, query_columns),
        keys_values=Linear(hidden, key_columns, count=2),
        output=Linear(spec.output_size, hidden),
        up=Linear(hidden, columns, count=spec.up_projections),
        down=Linear(columns, hidden),
    )


def _latent_columns(spec: ModelSpec, latent: Latent) -> tuple[int, int]:
    """Columns, for queries and for keys or values, of one product from the hidden state with the FLOPs of both."""
    hidden, rank = spec.hidden_size, latent.query_rank
    queries = spec.query_size if not rank else rank + rank * spec.query_size // hidden
    keys_values = latent.kv_rank + latent.rope_dim + latent.kv_rank * spec.latent_columns // hidden
    return queries, keys_values // 2


@cache
def routed_share(spec: ModelSpec) -> float:
    """Share of layers that route to experts."""
    return sum(spec.is_routed(layer) for layer in range(spec.layers)) / spec.layers


@cache
def mlp_columns(spec: ModelSpec) -> float:
    """MLP columns that one token passes through, averaged over the layers."""
    if spec.experts is None:
        return spec.mlp_size
    active = spec.experts.computed_per_token * spec.experts.mlp_size + spec.experts.shared_size
    return routed_share(spec) * active + (1 - routed_share(spec)) * spec.mlp_size


@dataclass(frozen=True, kw_only=True)
class Products:
    """Seconds of a layer's products, forward, for one micro-batch on one rank."""

    qkv_s: float
    output_s: float
    up_s: float
    down_s: float
    weights_once_s: float
    """Reading all weights of the layer once."""

    @property
    def forward_s(self) -> float:
        """All products of a layer."""
        return self.qkv_s + self.output_s + self.up_s + self.down_s


def grouped_share(spec: ModelSpec, tokens: float, *, depth: int) -> float:
    """Share of the usual rate that MLP products over sums of `depth` reach: grouped ones less, averaged over layers."""
    if spec.experts is None:
        return 1.0
    rows_each = tokens * spec.experts.computed_per_token / spec.experts.count
    reached = rows_each / (rows_each + GROUP_ROWS) * depth / (depth + GROUP_DEPTH)
    return 1 / (routed_share(spec) / reached + 1 - routed_share(spec))


def layer_products(ctx: CostContext, *, tokens: float, tensor: int) -> Products:
    """Products of one layer for `tokens` tokens, on one of `tensor` ranks."""
    spec, rates, weight_bytes = ctx.workload.spec, ctx.rates, ctx.workload.weight_bytes
    linears = layer_linears(spec)
    inner = spec.mlp_size if spec.experts is None else spec.experts.mlp_size

    def seconds(linear: Linear, reached: float = 1.0) -> float:
        weights = linear.weights / tensor
        multiplied_s = 2 * tokens * weights / (reached * rates.product_flop_s)
        read_s = weights * weight_bytes / rates.bytes_s
        return linear.count * rates.product_fixed_s + max(multiplied_s, read_s)

    return Products(
        qkv_s=seconds(linears.queries) + seconds(linears.keys_values),
        output_s=seconds(linears.output),
        up_s=seconds(linears.up, grouped_share(spec, tokens, depth=spec.hidden_size)),
        down_s=seconds(linears.down, grouped_share(spec, tokens, depth=inner)),
        weights_once_s=linears.weights / tensor * weight_bytes / rates.bytes_s,
    )


def head_filled_share(spec: ModelSpec, *, tokens: float, tensor: int) -> float:
    """Share of multiprocessors that work on the gradient of the hidden states in the fused loss, in 16 bits.

    A chunk's product has a small result, [chunk, hidden], and a long sum, over the vocabulary: there are fewer tiles
    than multiprocessors. Where there are very few, cuBLAS uses split-K, hence LEAST_FILLED.
    """
    columns, number_bytes = -(-spec.vocab_size // tensor), 2
    room_bytes = LOSS_CHUNK_BYTES + columns * spec.hidden_size * number_bytes
    rows = chunk_rows(int(tokens), room_bytes // (padded(columns) * number_bytes))
    tiles = math.ceil(rows / TILE[0]) * math.ceil(spec.hidden_size / TILE[1])
    return min(1.0, max(LEAST_FILLED, tiles / MULTIPROCESSORS))


def head_forward_s(ctx: CostContext, *, tokens: float, tensor: int) -> float:
    """Seconds of the output projection's forward product."""
    weights = ctx.workload.spec.vocabulary_params / tensor
    multiplied_s = 2 * weights * tokens / ctx.rates.head_flop_s
    read_s = weights * ctx.workload.weight_bytes / ctx.rates.bytes_s
    return max(multiplied_s, read_s)
