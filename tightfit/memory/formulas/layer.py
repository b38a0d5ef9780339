"""Layer: what one layer keeps, and its bytes at every moment, untiled (saved.py, layer_moments.py) or in tiles.

A tiled layer (levers/tiling.py) saves its input and attention's tensors. In backward its second half comes first, a
tile at a time: gate, up and the gradient of their product for a tile's tokens, beside float32 sums of the weights'
gradients over tiles. Then attention, a group of heads after another, then q, k and v's projections by tiles.
"""

from dataclasses import replace
from functools import lru_cache

from tightfit.jobs.engine import ENGINES
from tightfit.jobs.precision import FLOAT32_BYTES
from tightfit.jobs.projections import linear_shapes
from tightfit.levers.policy.recompute import KeepLevel
from tightfit.memory.formulas.adapter import expanded_bytes
from tightfit.memory.formulas.layer_moments import LayerCost, LayerMoment, attention_workspace, untiled_cost
from tightfit.memory.formulas.local_shape import LocalShape
from tightfit.memory.formulas.saved import SavedBytes, SavedTensor, attended, product_saved, total, untiled_saved
from tightfit.memory.formulas.segments import unsplit_rest


@lru_cache(maxsize=4096)
def layer_kept(shape: LocalShape, layer: int, level: KeepLevel = "everything") -> tuple[SavedTensor, ...]:
    """Everything layer `layer` keeps for backward at `level` of recomputation (levers/checkpoint_keep.py)."""
    saved = [SavedTensor("residual", "layer input", shape.stream_bytes, "to compute the layer again")]
    of_attention = attended(shape)
    if level == "everything" and shape.is_tiled(layer):
        saved += of_attention
    elif level == "everything":
        saved = untiled_saved(shape, layer)
    elif level != "nothing":
        saved += [tensor for tensor in of_attention if tensor.name in ("output", "logsumexp")]
    if level == "matmuls":
        products = [tensor for tensor in of_attention if tensor.name in ("queries", "keys and values")]
        kept_share = ENGINES[shape.engine_name].kept_product_share
        for tensor in products + product_saved(shape, layer):
            saved.append(tensor._replace(bytes=int(kept_share * tensor.bytes)))
    return tuple(tensor for tensor in saved if tensor.bytes)


@lru_cache(maxsize=4096)
def saved_bytes(shape: LocalShape, layer: int, level: KeepLevel) -> SavedBytes:
    """Bytes of the tensors of `layer_kept` by kind."""
    sums = dict.fromkeys(SavedBytes._fields, 0)
    for tensor in layer_kept(shape, layer, level):
        sums[tensor.kind] += tensor.bytes
        sums["unsplit"] += tensor.tensors * unsplit_rest(tensor.bytes // tensor.tensors)
    return SavedBytes(**sums)


@lru_cache(maxsize=4096)
def layer_cost(shape: LocalShape, layer: int) -> LayerCost:
    """All of layer `layer`'s bytes on one rank."""
    cost = (_tiled_cost if shape.is_tiled(layer) else untiled_cost)(shape, layer, total(layer_kept(shape, layer)))
    if shape.adapted is None:
        return cost
    whole = sum(outputs * inputs for outputs, inputs in linear_shapes(shape.spec).values())
    share = sum(shape.adapted.matrices(shape.spec)) / whole
    return replace(cost, backward=tuple(_with_share_trained(moment, share) for moment in cost.backward))


def _with_share_trained(moment: LayerMoment, share: float) -> LayerMoment:
    """`moment` with gradients of adapters' A and B in place of the frozen matrices', which have 1 / `share` as many."""
    complete = round(share * moment.complete_weights)
    new = round(share * (moment.complete_weights - moment.added_weights))
    copies = round(share * moment.weight_copies)
    return moment._replace(complete_weights=complete, added_weights=complete - new, weight_copies=copies)


@lru_cache(maxsize=4096)
def forward_extra(shape: LocalShape, layer: int, level: KeepLevel) -> int:
    """Bytes alive beside the tensors kept at `level`, when a forward pass ends its last layer."""
    cost = layer_cost(shape, layer)
    if level == "everything":
        return cost.forward_extra
    kept = saved_bytes(shape, layer, level)
    return max(0, cost.forward_working - kept.mlp - kept.routing)


def _tiled_cost(shape: LocalShape, layer: int, saved_bytes: int) -> LayerCost:
    """A tiled layer that keeps `saved_bytes`; its output does not count, as what comes next saves it."""
    spec = shape.spec
    mlp_weights = spec.hidden_size * (spec.up_projections + 1) * shape.columns(spec.mlp_size)
    weights = mlp_weights + spec.hidden_size * shape.heads * spec.head_dim
    inside_bytes = _tile_bytes(shape, inner=3) + expanded_bytes(shape, "down", 0)
    return LayerCost(
        forward_extra=inside_bytes,
        forward_working=max(saved_bytes - shape.stream_bytes, shape.query_bytes + inside_bytes),
        backward=(
            *_second_half(shape, saved_bytes, mlp_weights, weights),
            *_first_half(shape, layer, saved_bytes, done_weights=weights),
        ),
        recompute=LayerMoment("recomputed forward", saved_bytes, shape.stream_bytes),
    )


def _second_half(shape: LocalShape, saved_bytes: int, mlp_weights: int, weights: int) -> tuple[LayerMoment, ...]:
    """Backward from the layer's output to attention's: through the MLP and the output projection, `weights` in all."""
    arrived_bytes = 2 * shape.stream_bytes + shape.query_bytes  # gradients of y, x and attention's output
    keeps_product = shape.adapted is not None and shape.trains("down")
    product = LayerMoment(
        "gradient of a tile's product",
        saved_bytes=saved_bytes,
        # gate, up and the gradient of their product, beside it where an adapter keeps it
        temporary_bytes=arrived_bytes + _tile_bytes(shape, inner=4 if keeps_product else 3),
        workspace_bytes=expanded_bytes(shape, "down", 0),
        weight_copies=_float32_sums(shape, weights),
    )
    gate_and_up = product._replace(
        name="gradients of a tile's gate and up",
        temporary_bytes=arrived_bytes + _tile_bytes(shape, inner=shape.spec.up_projections, gradients=1),
        complete_weights=mlp_weights,
    )
    all_weights = product._replace(
        name="gradients of a tile's weights",
        temporary_bytes=arrived_bytes + _narrow_tile_bytes(shape),
        complete_weights=weights,
    )
    return product, gate_and_up, all_weights


def _first_half(shape: LocalShape, layer: int, saved_bytes: int, *, done_weights: int) -> tuple[LayerMoment, ...]:
    """Backward of the first half: attention, a group of heads at a time, then the projections of q, k and v."""
    groups = shape.head_groups
    weights = shape.spec.hidden_size * (shape.heads + 2 * shape.kv_heads) * shape.spec.head_dim
    heads = LayerMoment(
        "a group of attention's heads",
        saved_bytes=saved_bytes - shape.returned_bytes,
        temporary_bytes=shape.stream_bytes + shape.query_bytes + shape.qkv_bytes // groups,
        workspace_bytes=attention_workspace(shape, layer) // groups,
        complete_weights=done_weights,
    )
    projections = LayerMoment(
        "a tile of the projections",
        saved_bytes=shape.stream_bytes,
        temporary_bytes=2 * shape.stream_bytes + shape.qkv_bytes + _narrow_tile_bytes(shape),
        workspace_bytes=expanded_bytes(shape, "q", 0),
        complete_weights=done_weights + weights,
        added_weights=done_weights,
        weight_copies=_float32_sums(shape, weights),
    )
    return heads, projections


def _tile_bytes(shape: LocalShape, *, inner: int, gradients: int = 0) -> int:
    """Temporaries of one tile of the second half: `inner` tensors of the MLP's width, a copy of attention's output, the
    residual sum, its norm and the tile's result, and `gradients` of the norm's output."""
    spec = shape.spec
    stream = (3 + 2 * spec.sandwich_norms + gradients) * spec.hidden_size
    width = inner * shape.columns(spec.mlp_size) + stream + shape.heads * spec.head_dim
    return shape.tile_tokens * width * shape.element_bytes


def _narrow_tile_bytes(shape: LocalShape) -> int:
    """Temporaries of one tile when no tensor of the MLP's width exists."""
    width = 2 * shape.heads * shape.spec.head_dim + 5 * shape.spec.hidden_size
    return shape.tile_tokens * width * shape.element_bytes


def _float32_sums(shape: LocalShape, weights: int) -> int:
    """Float32 sums of gradients over tiles, as a number of elements of `element_bytes`."""
    return weights * FLOAT32_BYTES // shape.element_bytes
