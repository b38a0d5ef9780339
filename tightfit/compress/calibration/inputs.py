"""Statistics of a linear layer's inputs that calibration keeps: second moment, magnitudes, and a sample.

H = 1/n · Σ x xᵀ over all n tokens, in float32: the squared error of the layer's output for a change Δ of its weight is
tr(Δ H Δᵀ), so methods that compare outputs need no inputs beside H. Rounding of the inputs themselves (SmoothQuant) is
judged on `sample`.
"""

import torch
from torch import Tensor

from tightfit.errors import UserError

SAMPLE_ROWS = 512


class InputStatistics:
    """Sums over the tokens seen so far."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.moment = torch.zeros(size, size, device=device)
        self.largest = torch.zeros(size, device=device)
        self.magnitudes = torch.zeros(size, device=device)
        self.count = 0
        self._rows: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        """Add a batch of inputs [..., size]."""
        rows = x.detach().flatten(0, -2).to(torch.float32)
        self.moment.addmm_(rows.T, rows)
        magnitude = rows.abs()
        self.largest = torch.maximum(self.largest, magnitude.amax(0))
        self.magnitudes += magnitude.sum(0)
        self.count += len(rows)
        self._rows.append(rows[:: max(len(rows) // 32, 1)].clone())

    @property
    def hessian(self) -> Tensor:
        """H = 1/n · Σ x xᵀ."""
        return self.moment / max(self.count, 1)

    @property
    def mean_magnitude(self) -> Tensor:
        """Mean |x| of each channel."""
        return self.magnitudes / max(self.count, 1)

    @property
    def sample(self) -> Tensor:
        """At most 512 of the inputs, from all batches."""
        rows = torch.cat(self._rows)
        return rows[:: max(len(rows) // SAMPLE_ROWS, 1)][:SAMPLE_ROWS]


def unusable_inputs() -> UserError:
    """The error for a second moment that cannot be factored however much it is damped."""
    return UserError(
        "the inputs of a layer are no finite numbers, or too large to be squared; check the model's loss on this "
        "text with tightfit evaluate"
    )


def output_error(change: Tensor, hessian: Tensor) -> float:
    """Mean squared change of the layer's outputs, summed over outputs: tr(Δ H Δᵀ)."""
    return float((change @ hessian).mul_(change).sum())
