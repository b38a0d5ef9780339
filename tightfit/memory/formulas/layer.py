"""Layer: what one layer keeps for backward at each level of recomputation, and its bytes at every moment.

Tiled or not is decided here; saved.py and layer_moments.py are about whole layers, tiles.py about tiled ones.
"""

from functools import lru_cache

from tightfit.jobs.engine import ENGINES
from tightfit.levers.policy.recompute import KeepLevel
from tightfit.memory.formulas.engine_saved import engine_saved
from tightfit.memory.formulas.layer_moments import LayerCost, attention_kind, untiled_cost
from tightfit.memory.formulas.local_shape import LocalShape
from tightfit.memory.formulas.saved import (
    SavedBytes,
    SavedTensor,
    attended,
    attention_saved,
    mlp_saved,
    product_saved,
)
from tightfit.memory.formulas.tiles import tiled_cost, tiled_saved
from tightfit.models.spec import ModelSpec

__all__ = ["LayerCost", "attention_kind", "forward_extra", "layer_cost", "layer_kept", "level_kept", "saved_bytes"]


def layer_kept(spec: ModelSpec, layer: int, shape: LocalShape) -> tuple[SavedTensor, ...]:
    """Everything layer `layer` keeps for backward where it is not computed again."""
    if shape.is_tiled(spec, layer):
        return tuple(tiled_saved(spec, shape))
    return (
        *attention_saved(spec, shape),
        *mlp_saved(spec, layer, shape),
        *engine_saved(spec, layer, shape),
    )


@lru_cache(maxsize=4096)
def level_kept(spec: ModelSpec, layer: int, shape: LocalShape, level: KeepLevel) -> tuple[SavedTensor, ...]:
    """Everything layer `layer` keeps for backward at `level` (levers/checkpoint_keep.py)."""
    if level == "everything":
        return layer_kept(spec, layer, shape)
    saved = [SavedTensor("residual", "layer input", shape.stream_bytes(spec), "to compute the layer again")]
    of_attention = attended(spec, shape)
    if level != "nothing":
        saved += [tensor for tensor in of_attention if tensor.name in ("output", "logsumexp")]
    if level == "matmuls":
        products = [tensor for tensor in of_attention if tensor.name in ("queries", "keys and values")]
        products += product_saved(spec, layer, shape)
        kept_share = ENGINES[shape.engine_name].kept_product_share
        saved += [tensor._replace(bytes=int(kept_share * tensor.bytes)) for tensor in products]
    return tuple(saved)


@lru_cache(maxsize=4096)
def saved_bytes(spec: ModelSpec, layer: int, shape: LocalShape, level: KeepLevel) -> SavedBytes:
    """The same, added up by kind."""
    sums = dict.fromkeys(SavedBytes._fields, 0)
    for tensor in level_kept(spec, layer, shape, level):
        sums[tensor.kind] += tensor.bytes
    return SavedBytes(**sums)


@lru_cache(maxsize=4096)
def layer_cost(spec: ModelSpec, layer: int, shape: LocalShape) -> LayerCost:
    """All of layer `layer`'s bytes on one rank."""
    if shape.is_tiled(spec, layer):
        return tiled_cost(spec, layer, shape)
    attention_bytes = sum(tensor.bytes for tensor in attention_saved(spec, shape))
    mlp_bytes = sum(tensor.bytes for tensor in mlp_saved(spec, layer, shape))
    mlp_bytes += sum(tensor.bytes for tensor in engine_saved(spec, layer, shape))
    return untiled_cost(spec, layer, shape, attention_bytes, mlp_bytes)


@lru_cache(maxsize=4096)
def forward_extra(spec: ModelSpec, layer: int, shape: LocalShape, level: KeepLevel) -> int:
    """Alive beside what is kept at `level`, when a forward pass ends its last layer."""
    cost = layer_cost(spec, layer, shape)
    if level == "everything":
        return cost.forward_extra
    kept = saved_bytes(spec, layer, shape, level)
    return max(0, cost.forward_working - kept.mlp - kept.routing)
