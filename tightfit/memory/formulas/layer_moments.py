"""Moments of an untiled layer: what is alive beside the saved tensors while it runs forward, again, and backward.

Moments of backward are in its order: the MLP's, then attention's. They count gradients of activations in bytes, and of
how many of the layer's weights there is a gradient; what such a gradient takes is the business of gradients.py.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from tightfit.jobs.precision import FLOAT32_BYTES
from tightfit.levers.policy.recompute import needs_last_product
from tightfit.memory.formulas.adapter import expanded_bytes
from tightfit.memory.formulas.local_shape import LocalShape
from tightfit.memory.formulas.saved import attention_saved

AttentionKind = Literal["fused", "own"]


class LayerMoment(NamedTuple):
    """One moment of backward (or of computing again) inside one layer."""

    name: str
    saved_bytes: int
    """Of what the layer kept, what is still held."""
    gradient_bytes: int
    """Gradients of activations, and what else is alive beside what was kept."""
    workspace_bytes: int = 0
    complete_weights: int = 0
    """The layer's weights that have a gradient by then."""
    new_weights: int = 0
    """Those of `complete_weights` whose gradient is not yet added to a sum over micro-batches."""
    weight_copies: int = 0
    """Further copies of gradients, counted in weights."""

    @property
    def activation_bytes(self) -> int:
        """All but gradients of weights."""
        return self.saved_bytes + self.gradient_bytes + self.workspace_bytes

    def with_gradients(self, weights: int, element_bytes: int) -> int:
        """With gradients of so many weights, and further copies."""
        return self.activation_bytes + element_bytes * (weights + self.weight_copies)


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """A layer's bytes on one rank."""

    forward_extra: int
    """Alive beyond what is kept when forward ends it."""
    forward_working: int
    """Alive in a forward that keeps nothing."""
    backward: tuple[LayerMoment, ...]
    recompute: LayerMoment


def untiled_cost(shape: LocalShape, layer: int, saved_bytes: int) -> LayerCost:
    """Of a layer that keeps `saved_bytes`, its first half and its second together."""
    attention_bytes = sum(tensor.bytes for tensor in attention_saved(shape))
    # Where the stream is split by tokens, all tokens of it: what each block takes in, and the gradient it is given.
    # Forward holds the block's own. Backward holds the gradient, what the MLP took in and, gathered ahead or
    # recomputed, what attention did; then that and what the layer before's MLP did (collectives/conjugate.py).
    gathered_bytes = shape.hidden_bytes if shape.sequence_parallel else 0
    mlp = (_experts if shape.spec.is_routed(layer) else _dense_mlp)(shape, saved_bytes)
    attention = _attention_backward(shape, layer, attention_bytes, mlp.backward[-1].complete_weights)
    extra_bytes = mlp.forward_extra + gathered_bytes
    recompute_bytes = _recompute_extra(shape, layer, extra_bytes=extra_bytes, gathered_bytes=gathered_bytes)
    cost = LayerCost(
        forward_extra=extra_bytes,
        forward_working=max(mlp.forward_working, attention_bytes) + gathered_bytes,
        backward=(*_beside(mlp.backward, 3 * gathered_bytes), *_beside(attention, 2 * gathered_bytes)),
        recompute=LayerMoment("recomputed forward", saved_bytes, shape.stream_bytes + recompute_bytes),
    )
    return _on_a_cube(shape, cost) if shape.mesh_ranks == shape.tensor**3 else cost


def _recompute_extra(shape: LocalShape, layer: int, *, extra_bytes: int, gathered_bytes: int) -> int:
    """Beside the saved tensors and the gradient of the layer's output, when a layer has been computed again: what
    forward holds besides where it runs to its last product, else what gate and up took in."""
    if gathered_bytes or needs_last_product(shape.spec, layer):
        recompute_bytes = extra_bytes + gathered_bytes
    else:
        recompute_bytes = shape.routed_bytes if shape.spec.is_routed(layer) else 0
    if shape.adapted is None:
        return recompute_bytes
    inner_bytes = shape.inner_bytes(shape.spec.mlp_size)
    kept_product_bytes = inner_bytes if shape.trains("down") else 0  # which is not there yet while up is expanded
    return max(recompute_bytes, expanded_bytes(shape, "up", inner_bytes) - kept_product_bytes)


def _on_a_cube(shape: LocalShape, cost: LayerCost) -> LayerCost:
    """`cost` on a 3D mesh of side q, whose products gather q times what a rank has of both operands and scatter q times
    their result (collectives/cubic.py; other meshes send blocks one by one):

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
    working_bytes = 2 * stream_bytes + (ups + 1) * inner_bytes + forward_bytes
    return LayerCost(
        forward_extra=forward_bytes,
        forward_working=max(cost.forward_working, working_bytes),
        backward=(
            down._replace(gradient_bytes=stream_bytes + down_bytes),
            up._replace(gradient_bytes=stream_bytes + up_bytes),
            *attention,
        ),
        recompute=cost.recompute._replace(gradient_bytes=stream_bytes + forward_bytes),
    )


def _beside(moments: tuple[LayerMoment, ...], gathered_bytes: int) -> tuple[LayerMoment, ...]:
    return tuple(moment._replace(gradient_bytes=moment.gradient_bytes + gathered_bytes) for moment in moments)


class _Mlp(NamedTuple):
    """The second half of a layer: the first two as in LayerCost, and its backward."""

    forward_extra: int
    forward_working: int
    backward: tuple[LayerMoment, LayerMoment]


def _dense_mlp(shape: LocalShape, saved_bytes: int) -> _Mlp:
    """Forward makes gate, up, their product and the result; backward has the product's gradient beside the kept gate
    and up (whose gradients replace them), then the input's gradient."""
    spec, stream_bytes, hidden_bytes = shape.spec, shape.stream_bytes, shape.hidden_bytes
    inner_bytes = shape.inner_bytes(spec.mlp_size)
    matrix = spec.hidden_size * shape.columns(spec.mlp_size)
    has_adapters = shape.adapted is not None
    keeps_product = shape.trains("down") if has_adapters else spec.mlp_bias
    kept_product_bytes = inner_bytes if has_adapters and keeps_product else 0
    product = LayerMoment(
        "gradient of the MLP's product",
        saved_bytes=saved_bytes,
        gradient_bytes=stream_bytes + inner_bytes,
        workspace_bytes=expanded_bytes(shape, "down", inner_bytes),
        complete_weights=matrix,
        new_weights=matrix,
    )
    inputs = LayerMoment(
        "gradient of the MLP's input",
        saved_bytes=saved_bytes - kept_product_bytes,  # which down's backward was the last to need
        # with adapters gate and up are products apart: the gradient through one, and through the other
        gradient_bytes=stream_bytes + hidden_bytes * (spec.up_projections if has_adapters else 1),
        workspace_bytes=expanded_bytes(shape, "up", hidden_bytes),
        complete_weights=(spec.up_projections + 1) * matrix,
        new_weights=(spec.up_projections + 1) * matrix,
    )
    result_bytes = hidden_bytes + expanded_bytes(shape, "down", hidden_bytes)
    return _Mlp(
        # its product, unless that is kept, and its result
        forward_extra=(inner_bytes if spec.gated and not keeps_product else 0) + result_bytes,
        # the sum, its norm, gate, up and product, its result
        forward_working=2 * stream_bytes + (spec.up_projections + 1) * inner_bytes + result_bytes,
        backward=(product, inputs),
    )


def _experts(shape: LocalShape, saved_bytes: int) -> _Mlp:
    """Of kernels/routed_mlp.py: outputs of all rows beside their products or the tokens' sums; in backward the
    gradients of all rows beside that of their products, then of the rows' inputs."""
    spec, experts, rows_bytes, stream_bytes = shape.spec, shape.spec.experts, shape.routed_bytes, shape.stream_bytes
    assert experts is not None
    inner_bytes, hidden_bytes = shape.experts_inner_bytes, shape.hidden_bytes
    matrix = shape.experts * spec.hidden_size * shape.columns(experts.mlp_size)
    shared = spec.mlp_params(experts.shared_size) // shape.tensor if experts.shared_size else 0
    travels = shape.expert > 1
    arrived_bytes = rows_bytes if travels else 0  # what ranks sent back; the gradient of results, sorted into a copy
    down = LayerMoment(
        "gradient of the experts' down projections",
        saved_bytes=saved_bytes,
        # of every row's output, and of its product
        gradient_bytes=stream_bytes + arrived_bytes + rows_bytes + inner_bytes,
        complete_weights=shared + matrix,
        new_weights=matrix,
    )
    inputs = LayerMoment(
        "gradient of the experts' inputs",
        saved_bytes=saved_bytes,
        # through gate, through up, and their sum
        gradient_bytes=stream_bytes + arrived_bytes + 2 * rows_bytes + (rows_bytes if travels else hidden_bytes),
        complete_weights=shared + 3 * matrix,
        new_weights=3 * matrix,
    )
    # every row's input, gate and up beside their product or the tokens' sums
    working_bytes = rows_bytes + 2 * inner_bytes + max(inner_bytes, hidden_bytes)
    if travels:  # what was received and what was made of it, beside the products or what came back
        working_bytes = 2 * rows_bytes + max(3 * inner_bytes, rows_bytes + hidden_bytes)
    return _Mlp(
        forward_extra=rows_bytes + max(inner_bytes, hidden_bytes + arrived_bytes),
        forward_working=2 * stream_bytes + working_bytes,
        backward=(down, inputs),
    )


def _attention_backward(
    shape: LocalShape, layer: int, saved_bytes: int, mlp_weights: int
) -> tuple[LayerMoment, LayerMoment]:
    """Attention's own backward beside the gradients of all it read and wrote, then that of q, k and v's projections."""
    spec, stream_bytes = shape.spec, shape.stream_bytes
    output_weights = spec.hidden_size * shape.heads * spec.head_dim
    qkv_weights = spec.hidden_size * (shape.heads + 2 * shape.kv_heads) * spec.head_dim
    if spec.latent is not None:
        output_weights = spec.hidden_size * spec.output_size
        qkv_weights = spec.attention_params() - output_weights
    attention = LayerMoment(
        "attention",
        saved_bytes=saved_bytes - shape.returned_bytes,  # which the output projection's backward was the last to need
        # of the stream, the output, q, k and v
        gradient_bytes=stream_bytes + 2 * shape.query_bytes + 2 * shape.attended_key_bytes,
        workspace_bytes=attention_workspace(shape, layer) + ring_workspace(shape),
        complete_weights=mlp_weights + output_weights,
        new_weights=output_weights,
    )
    qkv_bytes = shape.query_bytes + 2 * shape.attended_key_bytes
    projections = LayerMoment(
        "gradient of the projections' input",
        saved_bytes=2 * stream_bytes,  # the norm's input and output
        # of the stream, of q, k and v, and of their input: through one of them, and summed over those before
        gradient_bytes=stream_bytes + qkv_bytes + 2 * shape.hidden_bytes,
        workspace_bytes=expanded_bytes(shape, "q", shape.hidden_bytes),
        complete_weights=mlp_weights + output_weights + qkv_weights,
        new_weights=qkv_weights,
    )
    return attention, projections


def attention_kind(shape: LocalShape, layer: int) -> AttentionKind:
    """Who computes attention (kernels/attention.py, rule, on Ampere and later): torch's fused kernels where causality
    says it all and they can, ours for windows, caps, and grouped heads in float32."""
    spec, window = shape.spec, shape.spec.window_of(layer)
    if spec.attention_softcap is not None or (window is not None and window < shape.whole_length):
        return "own"
    return "own" if shape.element_bytes == 4 and spec.kv_heads != spec.heads else "fused"


def attention_workspace(shape: LocalShape, layer: int) -> int:
    """What attention's backward holds while it runs, beside its inputs and results."""
    row_sums_bytes = FLOAT32_BYTES * shape.tokens * shape.heads  # one per query and head (flash_attention_backward.py)
    if attention_kind(shape, layer) == "own":
        return row_sums_bytes
    # dQ summed in float32, and dK and dV of every query head before groups are summed: FlashAttention-2's mha_bwd and
    # cuDNN's sdpa_backward alike.
    wide_dq_bytes = row_sums_bytes * shape.spec.head_dim if shape.element_bytes < FLOAT32_BYTES else 0
    ungrouped_bytes = 2 * shape.query_bytes if shape.heads != shape.attended_kv_heads else 0
    return row_sums_bytes + wide_dq_bytes + ungrouped_bytes


def ring_workspace(shape: LocalShape) -> int:
    """What a ring's backward holds besides (parallel/ring.py): keys and values at hand and arriving, the gradients of
    them (own, and float32 at hand and arriving), and the float32 sum of dQ."""
    if shape.ring == 1:
        return 0
    wide = FLOAT32_BYTES // shape.element_bytes
    return 6 * shape.attended_key_bytes + wide * (4 * shape.attended_key_bytes + shape.query_bytes)
