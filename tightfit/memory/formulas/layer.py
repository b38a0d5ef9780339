"""Layer: what one layer keeps for backward at each level of recomputation, and its bytes at every moment.

This file chooses between saved.py and layer_moments.py, for untiled layers, and tiles.py, for tiled ones.
"""

from dataclasses import replace
from functools import lru_cache

from tightfit.jobs.engine import ENGINES
from tightfit.jobs.projections import linear_shapes
from tightfit.levers.policy.recompute import KeepLevel
from tightfit.memory.formulas.layer_moments import LayerCost, LayerMoment, untiled_cost
from tightfit.memory.formulas.local_shape import LocalShape
from tightfit.memory.formulas.saved import (
    SavedBytes,
    SavedTensor,
    attended,
    attention_saved,
    engine_saved,
    mlp_saved,
    product_saved,
)
from tightfit.memory.formulas.segments import unsplit_rest
from tightfit.memory.formulas.tiles import tiled_cost, tiled_saved


@lru_cache(maxsize=4096)
def layer_kept(shape: LocalShape, layer: int, level: KeepLevel = "everything") -> tuple[SavedTensor, ...]:
    """Everything layer `layer` keeps for backward at `level` (levers/checkpoint_keep.py)."""
    if level == "everything":
        if shape.is_tiled(layer):
            return tiled_saved(shape)
        return *attention_saved(shape), *mlp_saved(shape, layer), *engine_saved(shape, layer)
    saved = [SavedTensor("residual", "layer input", shape.stream_bytes, "to compute the layer again")]
    of_attention = attended(shape)
    if level != "nothing":
        saved += [tensor for tensor in of_attention if tensor.name in ("output", "logsumexp")]
    if level == "matmuls":
        products = [tensor for tensor in of_attention if tensor.name in ("queries", "keys and values")]
        products += product_saved(shape, layer)
        kept_share = ENGINES[shape.engine_name].kept_product_share
        saved += [tensor._replace(bytes=int(kept_share * tensor.bytes)) for tensor in products]
    return tuple(saved)


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
    if shape.is_tiled(layer):
        cost = tiled_cost(shape, layer)
    else:
        saved_bytes = sum(tensor.bytes for tensor in layer_kept(shape, layer))
        cost = untiled_cost(shape, layer, saved_bytes)
    return replace(cost, backward=_trained_moments(shape, cost.backward))


def _trained_moments(shape: LocalShape, moments: tuple[LayerMoment, ...]) -> tuple[LayerMoment, ...]:
    """`moments`; under adapters with gradients of A and B in place of the frozen matrices'."""
    if shape.adapted is None:
        return moments
    whole = sum(outputs * inputs for outputs, inputs in linear_shapes(shape.spec).values())
    share = sum(shape.adapted.matrices(shape.spec)) / whole
    return tuple(
        each._replace(
            complete_weights=round(share * each.complete_weights),
            new_weights=round(share * each.new_weights),
            weight_copies=round(share * each.weight_copies),
        )
        for each in moments
    )


@lru_cache(maxsize=4096)
def forward_extra(shape: LocalShape, layer: int, level: KeepLevel) -> int:
    """Bytes alive beside the tensors kept at `level`, when a forward pass ends its last layer."""
    cost = layer_cost(shape, layer)
    if level == "everything":
        return cost.forward_extra
    kept = saved_bytes(shape, layer, level)
    return max(0, cost.forward_working - kept.mlp - kept.routing)
