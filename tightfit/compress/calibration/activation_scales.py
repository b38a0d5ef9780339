"""Static activation scales: one for all inputs of a linear layer, from calibration, by the range rules of weights.

| rule | range |
|---|---|
| `minmax` | the largest input that was seen: nothing that calibration saw saturates |
| `percentile` | the middle 99.9 % of a sample |
| `kl` | the largest times the ratio whose histogram differs least from the sample's; 8-bit floats: the largest |
| `mse` | the largest times the ratio of least squared error of the sample |

The formulas are those of models/quantized/ranges.py for one scale a tensor; the sample is `InputStatistics.sample`.
"""

import torch
from torch import Tensor

from tightfit.compress.calibration.inputs import InputStatistics
from tightfit.models.quantized.ranges import RangeRule, fit_grid
from tightfit.models.quantized.scheme import Kind, Scheme


def activation_scale(seen: InputStatistics, scheme: Scheme, rule: RangeRule) -> Tensor:
    """The scale [1] of inputs that `scheme` rounds, its range chosen by `rule`."""
    return scale_of_inputs(seen.sample, seen.largest.max(), scheme, rule)


@torch.no_grad()
def scale_of_inputs(sample: Tensor, largest: Tensor, scheme: Scheme, rule: RangeRule) -> Tensor:
    """The same, from a `sample` of the inputs and the `largest` magnitude of all of them."""
    kind: Kind = "fp8" if scheme.activations == "fp8" else "int"
    grid = fit_grid(sample, Scheme(kind=kind, bits=8, group=-1), rule, largest=largest)
    return grid.scale.reshape(1)
