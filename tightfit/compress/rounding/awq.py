"""AWQ: input channels with large activations are scaled up before rounding, so that their weights lose less.

    s = (mean |x|)^α / √(max s · min s),   W → W · s,   x → x / s (in the module before)   (Lin et al. 2023, eq. 4, 5)

α is searched from 0 to 1 for the least squared error of the set's outputs, which is tr(Δ H Δᵀ) and needs no forward
passes. Ranges are then clipped, group by group, for the least error of the group's part of the output; those of queries
and keys are not, as their product amplifies the clipping error. No Hessian is inverted: weights are rounded to nearest.
"""

import torch
from torch import Tensor

from tightfit.compress.calibration.inputs import InputStatistics, output_error
from tightfit.compress.linear_sets import LinearSet
from tightfit.compress.rounding.moving_scales import linear, move_scale
from tightfit.models.decoder import Layer
from tightfit.models.quantized.coded_weight import CodedWeight
from tightfit.models.quantized.ranges import fit_grid
from tightfit.models.quantized.scheme import Scheme

EXPONENTS = tuple(i / 20 for i in range(20))
NOT_CLIPPED = ("attention.q", "attention.k")


@torch.no_grad()
def scale_channels(layer: Layer, group: LinearSet, seen: InputStatistics, scheme: Scheme) -> float:
    """Search α for this set and fold the scales into it and the module before; the best α."""
    weights = [linear(layer, name).weight.float() for name in group.names]
    hessian, magnitude = seen.hessian, seen.mean_magnitude.clamp(min=1e-6)

    def error(exponent: float) -> float:
        scale = _scale(magnitude, exponent)
        changes = (fit_grid(w * scale, scheme).code(w * scale).dequantize() / scale - w for w in weights)
        return sum(output_error(change, hessian) for change in changes)

    best = min(EXPONENTS, key=error)
    if best:
        move_scale(layer, group, _scale(magnitude, best))
    return best


def _scale(magnitude: Tensor, exponent: float) -> Tensor:
    scale = magnitude.pow(exponent).clamp(min=1e-4)
    return scale / (scale.max() * scale.min()).sqrt()


def code_clipped(name: str, weight: Tensor, hessian: Tensor, scheme: Scheme) -> CodedWeight:
    """Weights rounded to nearest, in ranges clipped where that lowers the output error (never for queries and keys)."""
    if name in NOT_CLIPPED:
        return fit_grid(weight, scheme).code(weight)
    return fit_grid(weight, scheme, "mse", hessian).code(weight)
