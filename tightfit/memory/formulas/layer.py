"""Layer: bytes of one layer at every moment, tiled (tiles.py) or not (layer_moments.py)."""

from dataclasses import replace
from functools import lru_cache

from tightfit.jobs.projections import linear_shapes
from tightfit.levers.policy.recompute import KeepLevel
from tightfit.memory.formulas.layer_moments import LayerCost, LayerMoment, untiled_cost
from tightfit.memory.formulas.local_shape import LocalShape
from tightfit.memory.formulas.saved import layer_kept, saved_bytes, total
from tightfit.memory.formulas.tiles import tiled_cost


@lru_cache(maxsize=4096)
def layer_cost(shape: LocalShape, layer: int) -> LayerCost:
    """All of layer `layer`'s bytes on one rank."""
    cost = (tiled_cost if shape.is_tiled(layer) else untiled_cost)(shape, layer, total(layer_kept(shape, layer)))
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
