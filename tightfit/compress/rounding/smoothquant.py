"""SmoothQuant: outlier channels of the activations are shared out between activations and weights (Xiao et al. 2022).

    s_j = max |x_j|^α / max |w_j|^(1 − α),   x → x / s (in the norm before),   W → W · s        (eq. 4)

Both then fit 8 bits: weights with a scale per row, activations with one per token, or one in all (static). α is a
number, or searched for the least error of the set's outputs with both sides rounded. Only sets behind a norm are
smoothed, as in the paper.
"""

import torch
from torch import Tensor

from tightfit.compress.calibration.activation_scales import scale_of_inputs
from tightfit.compress.calibration.inputs import InputStatistics
from tightfit.compress.linear_sets import LinearSet
from tightfit.compress.recipe import Step
from tightfit.compress.rounding.moving_scales import linear, move_scale
from tightfit.kernels.quantized.rounded_linear import CODES, rounded_values
from tightfit.models.decoder import Layer
from tightfit.models.quantized.ranges import RangeRule, fit_grid
from tightfit.models.quantized.scheme import Scheme

STRENGTHS = tuple(i / 20 for i in range(5, 19))
BEHIND_NORMS = ("attention_norm", "attention.q_a_norm", "mlp_norm")


@torch.no_grad()
def smooth(layer: Layer, group: LinearSet, seen: InputStatistics, scheme: Scheme, step: Step) -> float | None:
    """Smooth one set with the step's α, or with the best one; the α used, None where the set is not behind a norm."""
    if group.before not in BEHIND_NORMS:
        return None
    weights = torch.cat([linear(layer, name).weight.float() for name in group.names])
    chosen = _best(weights, seen, scheme, step.static) if step.alpha is None else step.alpha
    move_scale(layer, group, _scale(seen.largest, weights, chosen))
    return chosen


def _best(weights: Tensor, seen: InputStatistics, scheme: Scheme, static: RangeRule | None) -> float:
    x = seen.sample
    wanted = x @ weights.T

    def error(alpha: float) -> float:
        scale = _scale(seen.largest, weights, alpha)
        smoothed, heavier = x / scale, weights * scale
        largest = (seen.largest / scale).max()
        input_scale = None if static is None else scale_of_inputs(smoothed, largest, scheme, static)
        inputs = rounded_values(smoothed, CODES[scheme.activations or "int8"], input_scale)
        outputs = inputs @ fit_grid(heavier, scheme).code(heavier).dequantize().T
        return float((outputs - wanted).square().sum())

    return min(STRENGTHS, key=error)


def _scale(largest: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """s of the formula; 1 for channels that are always zero."""
    scale = largest.pow(alpha) / weights.abs().amax(0).clamp(min=1e-5).pow(1 - alpha)
    return torch.where(largest > 0, scale.clamp(min=1e-5), torch.ones_like(scale))
