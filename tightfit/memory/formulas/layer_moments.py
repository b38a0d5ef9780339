"""Moments of an untiled layer: bytes alive beside the saved tensors in forward, in recomputation and in backward.

Moments of backward are in its order: the MLP's, then attention's. A moment has the bytes of activations' gradients and
other temporaries, and the number of the layer's weights that have a gradient by then; gradients.py turns it into bytes.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from tightfit.jobs.precision import FLOAT32_BYTES
from tightfit.levers.policy.recompute import needs_last_product
from tightfit.memory.formulas.adapter import expanded_bytes
from tightfit.memory.formulas.local_shape import LocalShape
from tightfit.memory.formulas.saved import attention_saved, total

AttentionKind = Literal["fused", "own"]


class LayerMoment(NamedTuple):
    """One moment of backward (or of recomputation) inside one layer."""

    name: str
    saved_bytes: int
    """The layer's saved tensors that are not freed yet."""
    temporary_bytes: int
    """Gradients of activations, and all other temporaries beside the saved tensors and the workspace."""
    workspace_bytes: int = 0
    complete_weights: int = 0
    """The layer's weights that have a gradient by then."""
    added_weights: int = 0
    """Those of `complete_weights` whose gradient is already added where micro-batches are summed."""
    weight_copies: int = 0
    """Further copies of weight gradients (float32 sums over tiles), as a number of elements of the weights' dtype."""

    @property
    def activation_bytes(self) -> int:
        """All but gradients of weights."""
        return self.saved_bytes + self.temporary_bytes + self.workspace_bytes


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """A layer's bytes on one rank."""

    forward_extra: int
    """Temporaries beside the saved tensors when the layer's forward ends."""
    forward_working: int
    """Peak of a forward without autograd, which saves nothing."""
    backward: tuple[LayerMoment, ...]
    recompute: LayerMoment


MlpCost = tuple[int, int, tuple[LayerMoment, LayerMoment]]
"""The MLP's forward_extra, forward_working and backward, as in LayerCost."""


def untiled_cost(shape: LocalShape, layer: int, saved_bytes: int) -> LayerCost:
    """A layer that keeps `saved_bytes`: attention and MLP together."""
    attention_bytes = total(attention_saved(shape))
    # With sequence parallelism each block's input and output gradient are all-gathered. Forward holds the running
    # block's input. The MLP's backward holds three: its output's gradient, its input and attention's input (prefetched
    # or recomputed). Attention's holds two: its input and that of the layer before's MLP (collectives/conjugate.py).
    gathered_bytes = shape.hidden_bytes if shape.sequence_parallel else 0
    mlp = _experts if shape.spec.is_routed(layer) else _dense_mlp
    mlp_extra_bytes, mlp_working_bytes, mlp_moments = mlp(shape, saved_bytes)
    attention_moments = _attention_backward(shape, layer, attention_bytes, mlp_moments[-1].complete_weights)
    extra_bytes = mlp_extra_bytes + gathered_bytes
    recompute_bytes = _recompute_extra(shape, layer, extra_bytes=extra_bytes, gathered_bytes=gathered_bytes)
    cost = LayerCost(
        forward_extra=extra_bytes,
        forward_working=max(mlp_working_bytes, attention_bytes) + gathered_bytes,
        backward=(*_beside(mlp_moments, 3 * gathered_bytes), *_beside(attention_moments, 2 * gathered_bytes)),
        recompute=LayerMoment("recomputed forward", saved_bytes, shape.stream_bytes + recompute_bytes),
    )
    return _on_a_cube(shape, cost) if shape.is_cube else cost


def _beside(moments: tuple[LayerMoment, ...], gathered_bytes: int) -> tuple[LayerMoment, ...]:
    return tuple(moment._replace(temporary_bytes=moment.temporary_bytes + gathered_bytes) for moment in moments)


def _recompute_extra(shape: LocalShape, layer: int, *, extra_bytes: int, gathered_bytes: int) -> int:
    """Temporaries when a layer has been recomputed, beside its saved tensors and the gradient of its output: forward's
    own if the last product is recomputed too, else the input of gate and up."""
    if gathered_bytes or needs_last_product(shape.spec, layer):
        recompute_bytes = extra_bytes + gathered_bytes
    else:
        recompute_bytes = shape.routed_bytes if shape.spec.is_routed(layer) else 0
    if shape.adapted is None:
        return recompute_bytes
    inner_bytes = shape.inner_bytes(shape.spec.mlp_size)
    kept_product_bytes = inner_bytes if shape.trains("down") else 0  # does not exist yet while up is expanded
    return max(recompute_bytes, expanded_bytes(shape, "up", inner_bytes) - kept_product_bytes)


def _on_a_cube(shape: LocalShape, cost: LayerCost) -> LayerCost:
    """`cost` on a 3D mesh of side q, whose products all-gather both operands, q times a rank's part each, and
    reduce-scatter a result of q times a rank's part (collectives/cubic.py; other meshes send blocks one by one):

    S, I: stream and MLP columns of a rank    down's backward: dY q S, its input q I, the input's gradient q I and I
    W: a gathered matrix, twice               gate and up's: their input q S, both gradients 2 q I, dX q S and S
    """
    spec, q, stream_bytes = shape.spec, shape.tensor, shape.stream_bytes
    inner_bytes, ups = shape.inner_bytes(spec.mlp_size), spec.up_projections
    weight_bytes = 2 * shape.element_bytes * spec.hidden_size * spec.mlp_size // q**2  # as it comes, and in order
    forward_bytes = q * inner_bytes + (q + 1) * stream_bytes + weight_bytes
    down_bytes = q * stream_bytes + (2 * q + 1) * inner_bytes + weight_bytes
    up_bytes = (2 * q + 1) * stream_bytes + ups * (q * inner_bytes + weight_bytes)
    down, up, *attention = cost.backward
    down = down._replace(temporary_bytes=stream_bytes + down_bytes)
    up = up._replace(temporary_bytes=stream_bytes + up_bytes)
    working_bytes = 2 * stream_bytes + (ups + 1) * inner_bytes + forward_bytes
    return LayerCost(
        forward_extra=forward_bytes,
        forward_working=max(cost.forward_working, working_bytes),
        backward=(down, up, *attention),
        recompute=cost.recompute._replace(temporary_bytes=stream_bytes + forward_bytes),
    )


def _dense_mlp(shape: LocalShape, saved_bytes: int) -> MlpCost:
    """Forward makes gate, up, their product and the result. Backward holds the product's gradient beside the saved gate
    and up, whose gradients are written in their place; then the input's gradient."""
    spec, stream_bytes, hidden_bytes = shape.spec, shape.stream_bytes, shape.hidden_bytes
    inner_bytes = shape.inner_bytes(spec.mlp_size)
    matrix = spec.hidden_size * shape.columns(spec.mlp_size)
    has_adapters = shape.adapted is not None
    keeps_product = shape.trains("down") if has_adapters else spec.mlp_bias
    product = LayerMoment(
        "gradient of the MLP's product",
        saved_bytes=saved_bytes,
        temporary_bytes=stream_bytes + inner_bytes,
        workspace_bytes=expanded_bytes(shape, "down", inner_bytes),
        complete_weights=matrix,
    )
    inputs = LayerMoment(
        "gradient of the MLP's input",
        saved_bytes=saved_bytes - (inner_bytes if has_adapters and keeps_product else 0),  # freed after down's backward
        # with adapters gate and up are separate products: one gradient of the input through each, before they are added
        temporary_bytes=stream_bytes + hidden_bytes * (spec.up_projections if has_adapters else 1),
        workspace_bytes=expanded_bytes(shape, "up", hidden_bytes),
        complete_weights=(spec.up_projections + 1) * matrix,
    )
    result_bytes = hidden_bytes + expanded_bytes(shape, "down", hidden_bytes)
    product_bytes = inner_bytes if spec.gated and not keeps_product else 0  # gate × up, unless that is kept
    # the residual sum, its norm, gate, up, their product, the result
    working_bytes = 2 * stream_bytes + (spec.up_projections + 1) * inner_bytes + result_bytes
    return product_bytes + result_bytes, working_bytes, (product, inputs)


def _experts(shape: LocalShape, saved_bytes: int) -> MlpCost:
    """kernels/experts/routed_mlp.py, whose rows are (token, expert) pairs. Forward ends with all rows' outputs, beside
    gate × up or the tokens' sums; backward holds gradients of all rows' outputs and of gate × up, then of inputs."""
    spec, experts, rows_bytes, stream_bytes = shape.spec, shape.spec.experts, shape.routed_bytes, shape.stream_bytes
    assert experts is not None
    inner_bytes, hidden_bytes = shape.experts_inner_bytes, shape.hidden_bytes
    matrix = shape.experts * spec.hidden_size * shape.columns(experts.mlp_size)
    shared = spec.mlp_params(experts.shared_size) // shape.tensor if experts.shared_size else 0
    travels = shape.expert > 1
    # results that other ranks sent back, and in backward the copy of results' gradients sorted by rank
    arrived_bytes = rows_bytes if travels else 0
    down = LayerMoment(
        "gradient of the experts' down projections",
        saved_bytes=saved_bytes,
        # gradients of every row's output, and of its gate × up
        temporary_bytes=stream_bytes + arrived_bytes + rows_bytes + inner_bytes,
        complete_weights=shared + matrix,
        added_weights=shared,
    )
    inputs = down._replace(
        name="gradient of the experts' inputs",
        # gradients of the rows' inputs through gate and through up, and their sum
        temporary_bytes=stream_bytes + arrived_bytes + 2 * rows_bytes + (rows_bytes if travels else hidden_bytes),
        complete_weights=shared + 3 * matrix,
    )
    # every row's output, gate and up, beside gate × up or the tokens' sums
    working_bytes = rows_bytes + 2 * inner_bytes + max(inner_bytes, hidden_bytes)
    if travels:  # received rows and their outputs, beside gate, up and their product, or beside what came back
        working_bytes = 2 * rows_bytes + max(3 * inner_bytes, rows_bytes + hidden_bytes)
    extra_bytes = rows_bytes + max(inner_bytes, hidden_bytes + arrived_bytes)
    return extra_bytes, 2 * stream_bytes + working_bytes, (down, inputs)


def _attention_backward(
    shape: LocalShape, layer: int, saved_bytes: int, mlp_weights: int
) -> tuple[LayerMoment, LayerMoment]:
    """Backward of attention itself, with gradients of its inputs and output; then of the q, k and v projections."""
    spec, stream_bytes = shape.spec, shape.stream_bytes
    output_weights = spec.hidden_size * shape.heads * spec.head_dim
    qkv_weights = spec.hidden_size * (shape.heads + 2 * shape.kv_heads) * spec.head_dim
    if spec.latent is not None:
        output_weights = spec.hidden_size * spec.output_size
        qkv_weights = spec.attention_params() - output_weights
    attention = LayerMoment(
        "attention",
        saved_bytes=saved_bytes - shape.returned_bytes,  # freed after the output projection's backward
        temporary_bytes=stream_bytes + shape.query_bytes + shape.qkv_bytes,  # gradients: stream, output, q, k and v
        workspace_bytes=attention_workspace(shape, layer),
        complete_weights=mlp_weights + output_weights,
        added_weights=mlp_weights,
    )
    projections = LayerMoment(
        "gradient of the projections' input",
        saved_bytes=2 * stream_bytes,  # the norm's input and output
        # gradients of the stream, of q, k and v, and of their input: the running projection's, and the sum so far
        temporary_bytes=stream_bytes + shape.qkv_bytes + 2 * shape.hidden_bytes,
        workspace_bytes=expanded_bytes(shape, "q", shape.hidden_bytes),
        complete_weights=mlp_weights + output_weights + qkv_weights,
        added_weights=mlp_weights + output_weights,
    )
    return attention, projections


def attention_kind(shape: LocalShape, layer: int) -> AttentionKind:
    """Which kernel computes attention on Ampere and later (as kernels/attention/attention.py): torch's fused ones for a
    plain causal mask, ours for windows, soft caps, and grouped key heads in float32."""
    spec, window = shape.spec, shape.spec.window_of(layer)
    is_windowed = window is not None and window < shape.whole_length
    is_grouped_float32 = shape.element_bytes == FLOAT32_BYTES and spec.kv_heads != spec.heads
    return "own" if is_windowed or is_grouped_float32 or spec.attention_softcap is not None else "fused"


def attention_workspace(shape: LocalShape, layer: int) -> int:
    """Workspace of attention's backward, beside its inputs and results.

    FlashAttention-2's mha_bwd and cuDNN's sdpa_backward both sum dQ in float32, and write dK and dV per query head
    before they are summed over each key head's group. Ring attention (parallel/ring.py) has current and arriving keys
    and values (4 tensors of key size), dK and dV of own keys (2), and float32 sums of dK and dV, current and arriving
    (4), and of dQ (1).
    """
    row_sums_bytes = FLOAT32_BYTES * shape.tokens * shape.heads  # one per query and head (flash_attention_backward.py)
    wide, keys_bytes = FLOAT32_BYTES // shape.element_bytes, shape.attended_key_bytes
    ring_bytes = 6 * keys_bytes + wide * (4 * keys_bytes + shape.query_bytes) if shape.ring > 1 else 0
    if attention_kind(shape, layer) == "own":
        return row_sums_bytes + ring_bytes
    wide_dq_bytes = row_sums_bytes * shape.spec.head_dim if shape.element_bytes < FLOAT32_BYTES else 0
    ungrouped_bytes = 2 * shape.query_bytes if shape.repeats_keys else 0
    return row_sums_bytes + wide_dq_bytes + ungrouped_bytes + ring_bytes
