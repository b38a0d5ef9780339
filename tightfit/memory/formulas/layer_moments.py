"""Moments of an untiled layer: what is alive beside the saved tensors while it runs forward, again, and backward.

Moments of backward are in its order: the MLP's, then attention's. They count gradients of activations in bytes, and of
how many of the layer's weights there is a gradient; what such a gradient takes is the business of gradients.py.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from tightfit.levers.policy.recompute import needs_last_product
from tightfit.memory.formulas.local_shape import LocalShape
from tightfit.memory.formulas.saved import STATISTIC
from tightfit.memory.formulas.tensor_mesh import CubicMlp, cubic_mlp
from tightfit.models.spec import ModelSpec

AttentionKind = Literal["fused", "own"]


class LayerMoment(NamedTuple):
    """One moment of backward (or of computing again) inside one layer."""

    name: str
    saved_bytes: int
    """Of what the layer kept, what is still held."""
    gradient_bytes: int
    """Gradients of activations, and what else is alive beside what was kept."""
    workspace_bytes: int = 0
    made_weights: int = 0
    """The layer's weights that have a gradient by then,"""
    new_weights: int = 0
    """those of them whose gradient is not yet added to a sum over micro-batches,"""
    weight_copies: int = 0
    """and further copies of gradients, in weights."""

    @property
    def held_bytes(self) -> int:
        """All but gradients of weights."""
        return self.saved_bytes + self.gradient_bytes + self.workspace_bytes


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """A layer's bytes on one rank."""

    kept: int
    """Saved for backward, unless it is computed again."""
    entry: int
    """Its input."""
    forward_extra: int
    """Alive beyond what is kept when forward ends it."""
    forward_working: int
    """Alive in a forward that keeps nothing."""
    backward: tuple[LayerMoment, ...]
    recompute: LayerMoment


def untiled_cost(spec: ModelSpec, layer: int, shape: LocalShape, attention_bytes: int, mlp_bytes: int) -> LayerCost:
    """Of a layer that keeps `attention_bytes` in its first half and `mlp_bytes` in its second."""
    stream_bytes, kept_bytes = shape.stream_bytes(spec), attention_bytes + mlp_bytes
    gathered_bytes = _gathered_bytes(spec, shape)
    extra_bytes = _mlp_forward_extra(spec, layer, shape) + gathered_bytes
    mlp = (_experts_moments if spec.is_routed(layer) else _mlp_moments)(spec, kept_bytes, shape)
    attention = _attention_moments(spec, layer, shape, attention_bytes, mlp[-1].made_weights)
    again_bytes = _copies_bytes(spec, layer, shape)
    if gathered_bytes or needs_last_product(spec, layer):
        again_bytes = extra_bytes + gathered_bytes
    cost = LayerCost(
        kept=kept_bytes,
        entry=stream_bytes,
        forward_extra=extra_bytes,
        forward_working=max(_mlp_working(spec, layer, shape), attention_bytes) + gathered_bytes,
        backward=(*_beside(mlp, 3 * gathered_bytes), *_beside(attention, 2 * gathered_bytes)),
        recompute=LayerMoment("recomputed forward", kept_bytes, stream_bytes + again_bytes),
    )
    cube = cubic_mlp(spec, shape)
    return cost if cube is None else _on_a_cube(spec, shape, cost, cube)


def _on_a_cube(spec: ModelSpec, shape: LocalShape, cost: LayerCost, cube: CubicMlp) -> LayerCost:
    """The same on a 3D mesh, whose products gather what they multiply."""
    stream_bytes, inner_bytes = shape.stream_bytes(spec), shape.inner_bytes(spec.mlp_size)
    down, up, *attention = cost.backward
    working_bytes = 2 * stream_bytes + (3 if spec.gated else 2) * inner_bytes + cube.forward_bytes
    return replace(
        cost,
        forward_extra=cube.forward_bytes,
        forward_working=max(cost.forward_working, working_bytes),
        backward=(
            down._replace(gradient_bytes=stream_bytes + cube.down_backward_bytes),
            up._replace(gradient_bytes=stream_bytes + cube.up_backward_bytes),
            *attention,
        ),
        recompute=cost.recompute._replace(gradient_bytes=stream_bytes + cube.forward_bytes),
    )


def _gathered_bytes(spec: ModelSpec, shape: LocalShape) -> int:
    """Where the stream is split by tokens, all tokens of it: what each block takes in, and the gradient it is given.

    Forward holds the block's own. Backward holds the gradient, what the MLP took in and, gathered ahead or recomputed,
    what attention did; then that and what the layer before's MLP did (parallel/conjugate.py).
    """
    return shape.hidden_bytes(spec) if shape.sequence_parallel else 0


def _beside(moments: tuple[LayerMoment, ...], gathered_bytes: int) -> tuple[LayerMoment, ...]:
    return tuple(moment._replace(gradient_bytes=moment.gradient_bytes + gathered_bytes) for moment in moments)


def _mlp_moments(spec: ModelSpec, kept: int, shape: LocalShape) -> tuple[LayerMoment, ...]:
    """The product's gradient beside the kept gate and up (whose gradients replace them), then the input's gradient."""
    stream, hidden, inner = shape.stream_bytes(spec), shape.hidden_bytes(spec), shape.inner_bytes(spec.mlp_size)
    matrix = spec.hidden_size * shape.columns(spec.mlp_size)
    matrices = (3 if spec.gated else 2) * matrix
    return (
        LayerMoment("gradient of the MLP's product", kept, stream + inner, made_weights=matrix, new_weights=matrix),
        LayerMoment("gradient of the MLP's input", kept, stream + hidden, made_weights=matrices, new_weights=matrices),
    )


def _experts_moments(spec: ModelSpec, kept: int, shape: LocalShape) -> tuple[LayerMoment, ...]:
    """Of kernels/routed_mlp.py: the gradients of all rows beside that of their products, then of the rows' inputs."""
    experts = spec.experts
    assert experts is not None
    copies, inner = shape.copies_bytes(spec), shape.experts_inner_bytes(spec)
    matrix = shape.experts(spec) * spec.hidden_size * shape.columns(experts.mlp_size)
    shared = spec.mlp_params(experts.shared_size) // shape.tensor if experts.shared_size else 0
    stream, travels = shape.stream_bytes(spec), shape.expert > 1
    arrived = copies if travels else 0  # the gradient of this rank's results, of which sorted copies are made
    summed = copies if travels else shape.hidden_bytes(spec)
    down = LayerMoment(
        "gradient of the experts' down projections",
        saved_bytes=kept,
        gradient_bytes=stream + arrived + copies + inner,  # of every row's output, and of its product
        made_weights=shared + matrix,
        new_weights=matrix,
    )
    inputs = LayerMoment(
        "gradient of the experts' inputs",
        saved_bytes=kept,
        gradient_bytes=stream + arrived + 2 * copies + summed,  # through gate, through up, and their sum
        made_weights=shared + 3 * matrix,
        new_weights=3 * matrix,
    )
    return down, inputs


def _copies_bytes(spec: ModelSpec, layer: int, shape: LocalShape) -> int:
    """A routed layer gathers its tokens, once per expert, for gate and up."""
    return shape.copies_bytes(spec) if spec.is_routed(layer) else 0


def _attention_moments(
    spec: ModelSpec, layer: int, shape: LocalShape, kept: int, mlp_weights: int
) -> tuple[LayerMoment, ...]:
    """Attention's own backward beside the gradients of all it read and wrote, then that of q, k and v's projections."""
    stream, query, key = shape.stream_bytes(spec), shape.query_bytes(spec), shape.attended_key_bytes(spec)
    output_weights = spec.hidden_size * shape.heads(spec) * spec.head_dim
    qkv_weights = spec.hidden_size * (shape.heads(spec) + 2 * shape.kv_heads(spec)) * spec.head_dim
    if spec.latent is not None:
        output_weights = spec.hidden_size * spec.output_size
        qkv_weights = spec.attention_params() - output_weights
    attention = LayerMoment(
        "attention",
        saved_bytes=kept - shape.returned_bytes(spec),  # which the output projection's backward was the last to need
        gradient_bytes=stream + 2 * query + 2 * key,  # of the stream, the output, q, k and v
        workspace_bytes=attention_workspace(spec, layer, shape) + ring_workspace(spec, shape),
        made_weights=mlp_weights + output_weights,
        new_weights=output_weights,
    )
    projections = LayerMoment(
        "gradient of the projections' input",
        saved_bytes=2 * stream,
        gradient_bytes=stream + query + 2 * key + 2 * shape.hidden_bytes(spec),
        made_weights=mlp_weights + output_weights + qkv_weights,
        new_weights=qkv_weights,
    )
    return attention, projections


def attention_kind(spec: ModelSpec, layer: int, shape: LocalShape) -> AttentionKind:
    """Who computes attention (kernels/attention.py, rule, on Ampere and later): torch's fused kernels where causality
    says it all and they can, ours for windows, caps, and grouped heads in float32."""
    window = spec.window_of(layer)
    if spec.attention_softcap is not None or (window is not None and window < shape.whole_length):
        return "own"
    return "own" if shape.element_bytes == 4 and spec.kv_heads != spec.heads else "fused"


def attention_workspace(spec: ModelSpec, layer: int, shape: LocalShape) -> int:
    """What attention's backward holds while it runs, beside its inputs and results."""
    heads, query_bytes = shape.heads(spec), shape.query_bytes(spec)
    row_sums_bytes = STATISTIC * shape.tokens * heads  # a float32 per row and head (flash_attention_backward.py)
    if attention_kind(spec, layer, shape) == "own":
        return row_sums_bytes
    # dQ summed in float32, and dK and dV of every query head before groups are summed: FlashAttention-2's mha_bwd and
    # cuDNN's sdpa_backward alike.
    wide_dq_bytes = STATISTIC * shape.tokens * heads * spec.head_dim if shape.element_bytes < STATISTIC else 0
    ungrouped_bytes = 2 * query_bytes if heads != shape.attended_kv_heads(spec) else 0
    return row_sums_bytes + wide_dq_bytes + ungrouped_bytes


def ring_workspace(spec: ModelSpec, shape: LocalShape) -> int:
    """What a ring's backward holds besides (parallel/ring.py): keys and values at hand and arriving, the gradients of
    them (own, and float32 at hand and arriving), and the float32 sum of dQ."""
    if shape.ring == 1:
        return 0
    query_bytes, key_bytes = shape.query_bytes(spec), shape.attended_key_bytes(spec)
    wide = STATISTIC // shape.element_bytes
    return 6 * key_bytes + 4 * wide * key_bytes + wide * query_bytes


def _mlp_forward_extra(spec: ModelSpec, layer: int, shape: LocalShape) -> int:
    """In a forward pass that keeps what it must: what is alive besides, when the MLP ends."""
    hidden_bytes = shape.hidden_bytes(spec)
    if spec.is_routed(layer):
        inner_bytes = shape.experts_inner_bytes(spec)
        outputs_bytes = _copies_bytes(spec, layer, shape)  # of all rows, beside their products or the tokens' sums
        returned_bytes = outputs_bytes if shape.expert > 1 else 0
        return outputs_bytes + max(inner_bytes, hidden_bytes + returned_bytes)
    product_bytes = shape.inner_bytes(spec.mlp_size) if spec.gated and not spec.mlp_bias else 0
    return product_bytes + hidden_bytes


def _mlp_working(spec: ModelSpec, layer: int, shape: LocalShape) -> int:
    """In a forward pass that keeps nothing: the sum, its norm and the MLP's own, when the MLP ends."""
    stream_bytes, hidden_bytes = shape.stream_bytes(spec), shape.hidden_bytes(spec)
    if spec.is_routed(layer):
        inner_bytes = shape.experts_inner_bytes(spec)
        copies_bytes = _copies_bytes(spec, layer, shape)
        if shape.expert > 1:  # what was received and what was made of it, beside the products or what came back
            rows_bytes = 2 * copies_bytes + max(3 * inner_bytes, copies_bytes + hidden_bytes)
        else:
            rows_bytes = copies_bytes + 2 * inner_bytes + max(inner_bytes, hidden_bytes)
        return 2 * stream_bytes + rows_bytes
    return 2 * stream_bytes + hidden_bytes + (3 if spec.gated else 2) * shape.inner_bytes(spec.mlp_size)
