"""Recompute: seconds of forward that checkpointed layers repeat in backward (levers/checkpointing.py).

By `checkpoint_keep`, a layer recomputes

    nothing     all but its last product, if nothing needs the product's result (kernels/recomputation.py)
    attention   the same without attention
    matmuls     norms and rope, and the gate if the last product is not skipped
    in tiles    norms, rope, q, k and v, and attention unless kept; tiles recompute the rest in any case (tiles.py)
"""

import math
from dataclasses import dataclass

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.rules.checkpointing import is_checkpointed
from tightfit.jobs.workload import Workload
from tightfit.levers.policy.recompute import KeepLevel
from tightfit.memory.formulas.keeping import layer_levels
from tightfit.memory.formulas.local_shape import local_shape
from tightfit.plan.seconds.layer import LayerTime
from tightfit.plan.seconds.tiles import second_half_is_computed_again


@dataclass(frozen=True)
class Recompute:
    """Recomputation for one micro-batch on the slowest pipeline rank."""

    seconds: float
    shares: tuple[tuple[KeepLevel, float], ...]
    """By kept level, the share of all layers that are recomputed from it."""

    @property
    def share(self) -> float:
        """The share of layers that are computed again."""
        return sum(share for _, share in self.shares)


NONE = Recompute(0.0, ())


def recompute(workload: Workload, layout: Layout, levers: Levers, layer: LayerTime, layers: int) -> Recompute:
    """The recomputation of a rank with `layers` layers."""
    if not is_checkpointed(levers):
        return NONE
    shares = _shares(workload, layout, levers, layers)
    tiled = second_half_is_computed_again(levers)
    skips_last = tiled or _skips_last_product(workload, layout)
    seconds = sum(share * _layer_s(layer, level, tiled=tiled, skips_last=skips_last) for level, share in shares)
    matmuls_share = sum(share for level, share in shares if level == "matmuls")
    seconds += matmuls_share * (1 - workload.engine.kept_product_share) * layer.products.forward_s
    return Recompute(layers * seconds, shares)


def _skips_last_product(workload: Workload, layout: Layout) -> bool:
    """Whether recomputation skips a layer's last product: a gated MLP's down projection, whose result backward does not
    need unless a norm, experts or tensor ranks follow it."""
    spec = workload.spec
    is_last = not spec.sandwich_norms and spec.experts is None and layout.tensor == 1
    return workload.engine.skips_last_product and spec.gated and is_last


def _shares(workload: Workload, layout: Layout, levers: Levers, layers: int) -> tuple[tuple[KeepLevel, float], ...]:
    if levers.checkpoint_budget_bytes is None and not levers.num_checkpoints:
        return ((levers.checkpoint_keep, math.ceil(layers / levers.checkpoint_every) / layers),)
    levels = layer_levels(local_shape(workload, layout, levers), levers, range(layers))
    return tuple((level, levels.count(level) / len(levels)) for level in sorted(set(levels) - {"everything"}))


def _layer_s(layer: LayerTime, level: KeepLevel, *, tiled: bool, skips_last: bool) -> float:
    """Seconds to recompute one layer that keeps `level`."""
    products, elementwise = layer.products, layer.elementwise
    passes_s = elementwise.norms_s + elementwise.heads_s + (0.0 if skips_last else elementwise.mlp_s)
    if level == "matmuls":
        return passes_s
    products_s = products.qkv_s
    if not tiled:
        products_s += products.output_s + products.up_s + (0.0 if skips_last else products.down_s)
    return products_s + passes_s + (layer.attention.forward_s if level == "nothing" else 0.0)
