"""Our layer: every tensor it keeps for backward, and what is alive besides at its fullest moments.

Derived from what the code saves on a GPU (models/decoder.py, models/mlp.py, kernels/), not from a general rule: norms
keep their input and one or two float32 per row; rope keeps its tables only; flash attention keeps q, k, v, its output
(which is the output projection's input) and a float32 per row and head; the gated MLP keeps gate and up and computes
their product again. A test compares each layer's bytes with what autograd really keeps.

Moments are those of the backward pass, in its order, and of a forward pass through the layer. They count gradients of
activations; the gradients of weights are the business of training.py. Layers in tiles have a file of their own,
tiles.py. Limits: context follows the papers, as its code is not here yet.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from tightfit.memory.formulas.share import Share, ceil
from tightfit.models.spec import ModelSpec

Kind = Literal["residual", "norms", "attention", "mlp", "routing"]
AttentionKind = Literal["fused", "own"]
Level = Literal["nothing", "attention", "matmuls", "everything"]
LEVELS: tuple[Level, ...] = ("nothing", "attention", "matmuls", "everything")
"""What a layer keeps of its forward pass, each with what the one before keeps: see keeping.py."""
STATISTIC, INDEX = 4, 8
"""Bytes of a float32 per row, and of an index."""


class Kept(NamedTuple):
    """One tensor kept for backward."""

    kind: Kind
    name: str
    bytes: int
    why: str


class Moment(NamedTuple):
    """One moment of backward through a layer: what is `held` of the kept, what is alive besides.

    `weights` counts the layer's weights that have a gradient by then, `made_weights` those whose gradient is not yet
    added to what was there, `weight_copies` further copies: all of what this rank holds of the layer.
    """

    name: str
    held: int
    gradients: int
    workspace: int
    weights: int
    made_weights: int
    weight_copies: int = 0


@dataclass(frozen=True)
class LayerCost:
    """A layer's bytes: kept, its input alone, in forward beyond what is kept, in a forward that keeps nothing."""

    kept: int
    entry: int
    forward_extra: int
    forward_working: int
    backward: tuple[Moment, ...]
    recompute: Moment


def attention_kind(spec: ModelSpec, layer: int, share: Share) -> AttentionKind:
    """Who computes attention (kernels/attention.py, rule, on Ampere and later): torch's fused kernels where causality
    says it all and they can, ours for windows, caps, and grouped heads in float32."""
    window = spec.window_of(layer)
    if spec.attention_softcap is not None or (window is not None and window < share.length * share.context):
        return "own"
    return "own" if share.element_bytes == 4 and spec.kv_heads != spec.heads else "fused"


def layer_kept(spec: ModelSpec, layer: int, share: Share) -> tuple[Kept, ...]:
    """Everything layer `layer` keeps for backward."""
    if is_tiled(spec, layer, share):
        from tightfit.memory.formulas.tiles import tiled_kept

        return tiled_kept(spec, share)
    return (*attention_kept(spec, share), *mlp_kept(spec, layer, share))


@lru_cache(maxsize=4096)
def level_kept(spec: ModelSpec, layer: int, share: Share, level: Level) -> tuple[Kept, ...]:
    """Everything layer `layer` keeps for backward at `level` (levers/checkpoint_keep.py)."""
    if level == "everything":
        return layer_kept(spec, layer, share)
    found = [Kept("residual", "layer input", stream_bytes(spec, share), "to compute the layer again")]
    of_attention = attended(spec, share)
    if level != "nothing":
        found += [kept for kept in of_attention if kept.name in ("output", "logsumexp")]
    if level == "matmuls":
        found += [kept for kept in of_attention if kept.name in ("queries", "keys and values")]
        found += _products(spec, layer, share)
    return tuple(found)


def _products(spec: ModelSpec, layer: int, share: Share) -> list[Kept]:
    """Results of the output projection and of the MLP's, the last only where a norm or a router needs it."""
    n, e = share.tokens, share.element_bytes
    full = n * spec.hidden_size * e
    found = [Kept("attention", "projected output", full, "the sum with the residual is computed again")]
    if not spec.is_routed(layer):
        inner = n * ceil(spec.mlp_size, share.tensor) * e
        found.append(Kept("mlp", "gate and up", (2 if spec.gated else 1) * inner, "the activation is computed again"))
        return found + ([Kept("mlp", "output", full, "its norm is computed again")] if spec.sandwich_norms else [])
    experts = spec.experts
    assert experts is not None
    width, inside = ceil(experts.mlp_size, share.tensor), experts.per_token * n * e
    found += [
        Kept("routing", "router's scores", n * experts.count * e, "the choice of experts is computed again"),
        Kept("mlp", "experts' gate, up and output", inside * (2 * width + spec.hidden_size), "scaled again"),
    ]
    if experts.shared_size:
        shared = n * (2 * ceil(experts.shared_size, share.tensor) + spec.hidden_size + 1) * e
        found.append(Kept("mlp", "shared expert's gate, up, output and share", shared, "multiplied again"))
    return found


def attention_kept(spec: ModelSpec, share: Share) -> tuple[Kept, ...]:
    """Of the first half: from the residual stream to the attention's output before it is added."""
    stream, statistics = stream_bytes(spec, share), _statistics(spec, share.outer_tokens)
    found = [
        Kept("residual", "layer input", stream, "row_norm keeps its input"),
        Kept("norms", "attention norm statistics", statistics, "row_norm keeps float32 per row"),
        Kept("attention", "projections' input", stream, "the q, k and v projections share the norm's output"),
    ]
    if spec.qk_norm:
        width = (share.heads(spec) + share.kv_heads(spec)) * spec.head_dim
        heads = share.heads(spec) + share.kv_heads(spec)
        found += [
            Kept("norms", "queries and keys before their norms", share.tokens * width * share.element_bytes,
                 "row_norm keeps its input"),
            Kept("norms", "query and key norm statistics", _statistics(spec, share.tokens * heads),
                 "row_norm keeps float32 per row"),
        ]  # fmt: skip
    found += attended(spec, share)
    if spec.sandwich_norms:
        found += [
            Kept("norms", "attention output before its norm", stream, "row_norm keeps its input"),
            Kept("norms", "attention output norm statistics", statistics, "row_norm keeps float32 per row"),
        ]
    return tuple(found)


def attended(spec: ModelSpec, share: Share) -> list[Kept]:
    n, e, heads = share.tokens, share.element_bytes, share.heads(spec)
    queries, keys = n * heads * spec.head_dim * e, n * share.kv_heads(spec) * spec.head_dim * e
    return [
        Kept("attention", "queries", queries, "flash attention keeps what rope wrote"),
        Kept("attention", "keys and values", 2 * keys, "flash attention keeps them once per key head"),
        Kept("attention", "output", queries, "attention and the output projection share it"),
        Kept("attention", "logsumexp", STATISTIC * n * heads, "flash attention keeps float32 per row and head"),
    ]


def mlp_kept(spec: ModelSpec, layer: int, share: Share) -> tuple[Kept, ...]:
    """Of the second half: from the sum with the attention's output to the MLP's output before it is added."""
    stream, statistics = stream_bytes(spec, share), _statistics(spec, share.outer_tokens)
    found = [
        Kept("residual", "sum after attention", stream, "row_norm keeps the sum it norms"),
        Kept("norms", "MLP norm statistics", statistics, "row_norm keeps float32 per row"),
        Kept("mlp", "input", stream, "gate and up projections (or router) share the norm's output"),
    ]
    found += _routed(spec, share) if spec.is_routed(layer) else _projected(spec, spec.mlp_size, share)
    if spec.sandwich_norms:
        found += [
            Kept("norms", "MLP output before its norm", stream, "row_norm keeps its input"),
            Kept("norms", "MLP output norm statistics", statistics, "row_norm keeps float32 per row"),
        ]
    return tuple(found)


def _projected(spec: ModelSpec, width: int, share: Share) -> list[Kept]:
    inner = share.tokens * ceil(width, share.tensor) * share.element_bytes
    if not spec.gated:
        return [
            Kept("mlp", "up", inner, "the activation keeps its input"),
            Kept("mlp", "activated", inner, "the down projection keeps its input"),
        ]
    found = [Kept("mlp", "gate and up", 2 * inner, "gated_mlp keeps both and computes their product again")]
    if spec.mlp_bias:
        found.append(Kept("mlp", "product", inner, "projections with biases are modules, and down keeps its input"))
    return found


def _routed(spec: ModelSpec, share: Share) -> list[Kept]:
    """Token copies sorted by expert; balanced, where experts are on several ranks."""
    experts = spec.experts
    assert experts is not None
    n, e, k = share.tokens, share.element_bytes, experts.per_token
    copies = n * k * spec.hidden_size * e
    normalised = STATISTIC * n * (k + 1) if experts.normalise else 0
    found = [
        Kept("routing", "router probabilities", STATISTIC * (n + 1) * experts.count, "softmax output, balance shares"),
        Kept("routing", "chosen experts and order", 3 * INDEX * n * k, "top-k, gather and scatter keep their indices"),
        Kept("routing", "weights", normalised + n * k * e, "normalising keeps both sides, scaling its factor"),
        Kept("routing", "tokens sorted by expert", copies, "the experts' projections share their input"),
        Kept("routing", "expert outputs before and after scaling", 2 * copies, "mul and index_add keep their inputs"),
        Kept("mlp", "experts' gate, up and product", 3 * n * k * ceil(experts.mlp_size, share.tensor) * e,
             "glu keeps gate and up, the down projection its input"),
    ]  # fmt: skip
    if experts.shared_size:
        found += _projected(spec, experts.shared_size, share)
        found.append(
            Kept("mlp", "shared expert's output and gate", n * (spec.hidden_size + 1) * e, "mul keeps both sides")
        )
    return found


@lru_cache(maxsize=4096)
def layer_cost(spec: ModelSpec, layer: int, share: Share) -> LayerCost:
    """All of layer `layer`'s numbers on one rank."""
    if is_tiled(spec, layer, share):
        from tightfit.memory.formulas.tiles import tiled_cost

        return tiled_cost(spec, layer, share)
    first = sum(kept.bytes for kept in attention_kept(spec, share))
    second = sum(kept.bytes for kept in mlp_kept(spec, layer, share))
    gathered = _gathered(spec, share)
    extra = _mlp_forward_extra(spec, layer, share) + gathered
    mlp = _routed_moments(spec, first + second, share) if spec.is_routed(layer) else _mlp_moments(
        spec, first + second, share)  # fmt: skip
    attention = _attention_moments(spec, layer, share, first, mlp[-1].weights)
    stream = stream_bytes(spec, share)
    last = extra + gathered if gathered or needs_last(spec, layer) else 0
    return LayerCost(
        kept=first + second,
        entry=stream,
        forward_extra=extra,
        forward_working=max(_working(spec, layer, share), first) + gathered,
        backward=(*_beside(mlp, 3 * gathered), *_beside(attention, 2 * gathered)),
        recompute=Moment("recomputed forward", first + second, stream + last, 0, 0, 0),
    )


def _gathered(spec: ModelSpec, share: Share) -> int:
    """Where the stream is split by tokens, all tokens of it: what each block takes in, and the gradient it is given.

    Forward holds the block's own. Backward holds the gradient, what the MLP took in and, gathered ahead or recomputed,
    what attention did; then that and what the layer before's MLP did (parallel/conjugate.py).
    """
    return share.tokens * spec.hidden_size * share.element_bytes if share.sequence_parallel else 0


def _beside(moments: tuple[Moment, ...], gathered: int) -> tuple[Moment, ...]:
    return tuple(moment._replace(gradients=moment.gradients + gathered) for moment in moments)


def is_tiled(spec: ModelSpec, layer: int, share: Share) -> bool:
    """Whether layer `layer` works in tiles: where any is, all are but those routed to experts."""
    return share.tiles > 1 and not spec.is_routed(layer)


def needs_last(spec: ModelSpec, layer: int) -> bool:
    """Whether backward needs the result of the layer's last product: of a norm after it, or to weigh experts."""
    return spec.sandwich_norms or spec.is_routed(layer)


@lru_cache(maxsize=4096)
def forward_beside(spec: ModelSpec, layer: int, share: Share, level: Level) -> int:
    """Alive beside what is kept at `level`, when a forward pass ends its last layer."""
    cost = layer_cost(spec, layer, share)
    if level == "everything":
        return cost.forward_extra
    kept = sum(kept.bytes for kept in level_kept(spec, layer, share, level) if kept.kind in ("mlp", "routing"))
    return max(0, cost.forward_working - kept)


def _mlp_moments(spec: ModelSpec, kept: int, share: Share) -> tuple[Moment, ...]:
    """The product's gradient beside the kept gate and up (whose gradients replace them), then the input's gradient."""
    stream, full = stream_bytes(spec, share), share.tokens * spec.hidden_size * share.element_bytes
    width = ceil(spec.mlp_size, share.tensor)
    inner, matrix = share.tokens * width * share.element_bytes, spec.hidden_size * width
    matrices = (3 if spec.gated else 2) * matrix
    return (
        Moment("gradient of the MLP's product", kept, stream + inner, 0, matrix, matrix),
        Moment("gradient of the MLP's input", kept, stream + full, 0, matrices, matrices),
    )


def _routed_moments(spec: ModelSpec, kept: int, share: Share) -> tuple[Moment, ...]:
    """Scaling back holds three gradients of token copies, less what index_add kept; then experts' weights, stacked."""
    experts = spec.experts
    assert experts is not None
    n, e, k = share.tokens, share.element_bytes, experts.per_token
    stream, copies = stream_bytes(spec, share), n * k * spec.hidden_size * e
    width = ceil(experts.mlp_size, share.tensor)
    matrix = ceil(experts.count, share.expert) * spec.hidden_size * width
    shared = spec.mlp_params(experts.shared_size) // share.tensor if experts.shared_size else 0
    used, sent = kept - 3 * n * k * width * e - 2 * copies, _sent_copies(spec, share)
    return (
        Moment("gradients of the experts' outputs", kept, stream + 2 * copies, sent, shared, 0),
        Moment("experts' weights stacked", used, stream + 2 * copies, sent, shared + 3 * matrix, 3 * matrix, matrix),
    )


def _sent_copies(spec: ModelSpec, share: Share) -> int:
    """Where experts are on several ranks, token copies lie in a buffer each to be sent and received."""
    if share.expert == 1 or spec.experts is None:
        return 0
    return 2 * share.tokens * spec.experts.per_token * spec.hidden_size * share.element_bytes


def _attention_moments(spec: ModelSpec, layer: int, share: Share, held: int, mlp_weights: int) -> tuple[Moment, ...]:
    n, e, heads = share.tokens, share.element_bytes, share.heads(spec)
    stream, queries = stream_bytes(spec, share), n * heads * spec.head_dim * e
    keys = n * share.kv_heads(spec) * spec.head_dim * e
    output = heads * spec.head_dim * spec.hidden_size
    others = spec.hidden_size * (heads + 2 * share.kv_heads(spec)) * spec.head_dim
    work = attention_workspace(spec, layer, share)
    ring = 4 * keys if share.context > 1 else 0  # the neighbours' keys and values, arriving while others are used
    arrived = stream + 2 * queries + 2 * keys  # of the residual stream, the output, q, k and v
    projections = stream + queries + 2 * keys + 2 * n * spec.hidden_size * e
    every = mlp_weights + output + others
    return (
        Moment("attention", held, arrived, work + ring, mlp_weights + output, output),
        Moment("gradient of the projections' input", 2 * stream, projections, 0, every, others),
    )


def attention_workspace(spec: ModelSpec, layer: int, share: Share) -> int:
    """What attention's backward holds while it runs, beside its inputs and results."""
    heads, e = share.heads(spec), share.element_bytes
    queries = share.tokens * heads * spec.head_dim * e
    work = STATISTIC * share.tokens * heads  # a float32 per row and head (flash_attention_backward.py)
    if attention_kind(spec, layer, share) == "fused":
        # dQ summed in float32, and dK and dV of every query head before groups are summed: FlashAttention-2's mha_bwd
        # and cuDNN's sdpa_backward alike.
        work += (queries // e * STATISTIC if e < STATISTIC else 0) + 2 * queries * (heads != share.kv_heads(spec))
    return work


def _mlp_forward_extra(spec: ModelSpec, layer: int, share: Share) -> int:
    """In a forward pass that keeps what it must: what is alive besides, when the MLP ends."""
    full = share.tokens * spec.hidden_size * share.element_bytes
    if spec.is_routed(layer):
        assert spec.experts is not None
        pieces = spec.experts.per_token * full  # before they are joined; beside them the sum and its zeros
        return pieces + 2 * full + _sent_copies(spec, share)
    inner = share.tokens * ceil(spec.mlp_size, share.tensor) * share.element_bytes
    alive = inner if spec.gated and not spec.mlp_bias else 0
    return alive + full


def _working(spec: ModelSpec, layer: int, share: Share) -> int:
    """In a forward pass that keeps nothing: the sum, its norm and the MLP's own, when the MLP ends."""
    stream, full = stream_bytes(spec, share), share.tokens * spec.hidden_size * share.element_bytes
    if spec.is_routed(layer):
        assert spec.experts is not None
        return 2 * stream + (4 * spec.experts.per_token + 2) * full + _sent_copies(spec, share)
    inner = share.tokens * ceil(spec.mlp_size, share.tensor) * share.element_bytes
    return 2 * stream + full + (3 if spec.gated else 2) * inner


def stream_bytes(spec: ModelSpec, share: Share) -> int:
    """The residual stream between two layers."""
    return share.outer_tokens * spec.hidden_size * share.element_bytes


def _statistics(spec: ModelSpec, rows: int) -> int:
    return STATISTIC * rows * (2 if spec.norm == "layer" else 1)
