"""A layer in tiles (levers/tiling.py): what it keeps for backward, and what is alive besides at its fullest moments.

It keeps its input and what attention keeps. In backward its second half comes first, a tile at a time: gate, up and the
gradient of their product for a tile's tokens, beside float32 sums of the weights' gradients and those of the tile at
hand. Then attention, a group of heads after another, then the projections, again by tiles.
"""

from tightfit.memory.formulas.layer_moments import LayerCost, LayerMoment, attention_workspace, ring_workspace
from tightfit.memory.formulas.local_shape import LocalShape, ceil
from tightfit.memory.formulas.saved import STATISTIC, SavedTensor, attended
from tightfit.models.spec import ModelSpec


def tiled_saved(spec: ModelSpec, shape: LocalShape) -> list[SavedTensor]:
    """Everything a tiled layer keeps for backward."""
    return [
        SavedTensor("residual", "layer input", shape.stream_bytes(spec), "both halves keep it"),
        *attended(spec, shape),
    ]


def tile_bytes(spec: ModelSpec, shape: LocalShape, *, inner: int, gradients: int = 0) -> int:
    """Alive of one tile of the second half: so many tensors of the MLP's width, attention's output joined, the sum, its
    norm and the tile's result, and `gradients` of the norm."""
    stream = (3 + 2 * spec.sandwich_norms + gradients) * spec.hidden_size
    width = inner * shape.columns(spec.mlp_size) + stream + shape.heads(spec) * spec.head_dim
    return ceil(shape.tokens, shape.tiles) * width * shape.element_bytes


def tiled_cost(spec: ModelSpec, layer: int, shape: LocalShape) -> LayerCost:
    """All of a tiled layer's bytes; the new residual stream is what the next layer or the final norm keeps."""
    kept_bytes = sum(tensor.bytes for tensor in tiled_saved(spec, shape))
    stream_bytes, inside_bytes = shape.stream_bytes(spec), tile_bytes(spec, shape, inner=3)
    return LayerCost(
        kept=kept_bytes,
        entry=stream_bytes,
        forward_extra=inside_bytes,
        forward_working=max(kept_bytes - stream_bytes, shape.query_bytes(spec) + inside_bytes),
        backward=(*_second_half(spec, shape, kept_bytes), *_first_half(spec, layer, shape, kept_bytes)),
        recompute=LayerMoment("recomputed forward", kept_bytes, stream_bytes),
    )


def _second_half(spec: ModelSpec, shape: LocalShape, kept_bytes: int) -> tuple[LayerMoment, ...]:
    """From the new residual stream to attention's output."""
    weights = _second_half_weights(spec, shape)
    mlp_weights = weights - spec.hidden_size * shape.heads(spec) * spec.head_dim
    arrived_bytes = 2 * shape.stream_bytes(spec) + shape.query_bytes(spec)  # gradients of y, x and attention's output
    product = LayerMoment(
        "gradient of a tile's product",
        saved_bytes=kept_bytes,
        gradient_bytes=arrived_bytes + tile_bytes(spec, shape, inner=3),
        weight_copies=_float32_sums(weights, shape),
    )
    gate_and_up = product._replace(
        name="gradients of a tile's gate and up",
        gradient_bytes=arrived_bytes + tile_bytes(spec, shape, inner=2 if spec.gated else 1, gradients=1),
        made_weights=mlp_weights,
        new_weights=mlp_weights,
    )
    all_weights = product._replace(
        name="gradients of a tile's weights",
        gradient_bytes=arrived_bytes + _narrow_tile_bytes(spec, shape),
        made_weights=weights,
        new_weights=weights,
    )
    return product, gate_and_up, all_weights


def _first_half(spec: ModelSpec, layer: int, shape: LocalShape, kept_bytes: int) -> tuple[LayerMoment, ...]:
    """Attention, a group of heads at a time, then the projections of q, k and v."""
    stream_bytes, query_bytes, groups = shape.stream_bytes(spec), shape.query_bytes(spec), shape.head_groups(spec)
    key_bytes, workspace_bytes = shape.attended_key_bytes(spec), attention_workspace(spec, layer, shape)
    done = _second_half_weights(spec, shape)
    weights = spec.hidden_size * (shape.heads(spec) + 2 * shape.kv_heads(spec)) * spec.head_dim
    return (
        LayerMoment(
            "a group of attention's heads",
            saved_bytes=kept_bytes - shape.returned_bytes(spec),
            gradient_bytes=stream_bytes + query_bytes + (query_bytes + 2 * key_bytes) // groups,
            workspace_bytes=(workspace_bytes + ring_workspace(spec, shape)) // groups,
            made_weights=done,
            new_weights=done,
        ),
        LayerMoment(
            "a tile of the projections",
            saved_bytes=stream_bytes,
            gradient_bytes=2 * stream_bytes + query_bytes + 2 * key_bytes + _narrow_tile_bytes(spec, shape),
            made_weights=done + weights,
            new_weights=weights,
            weight_copies=_float32_sums(weights, shape),
        ),
    )


def _second_half_weights(spec: ModelSpec, shape: LocalShape) -> int:
    mlp_columns = (3 if spec.gated else 2) * shape.columns(spec.mlp_size)
    return spec.hidden_size * (mlp_columns + shape.heads(spec) * spec.head_dim)


def _narrow_tile_bytes(spec: ModelSpec, shape: LocalShape) -> int:
    """Alive of a tile when nothing of the MLP's width is."""
    width = 2 * shape.heads(spec) * spec.head_dim + 5 * spec.hidden_size
    return ceil(shape.tokens, shape.tiles) * width * shape.element_bytes


def _float32_sums(weights: int, shape: LocalShape) -> int:
    """The sums of gradients over tiles, counted in weights of `element_bytes`."""
    return weights * STATISTIC // shape.element_bytes
