"""RoundedWeight: a matrix in 8 bits whose inputs are rounded to 8 bits too (W8A8), integers or floats.

Products are kernels/quantized/rounded_linear.py's for any number of tokens: twice the rate of 16 bits for many, half
the reading for few. The activation before the last product of a layer is computed where its result is rounded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from tightfit.kernels.quantized.rounded_linear import rounded_linear
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.spec import Activation
from tightfit.serve.weights.weight import Weight, join_buffers


@dataclass(frozen=True, eq=False)
class RoundedWeight(Weight):
    """Codes [N, K], the scale of each row [N, 1], and the inputs' scale [1] where it is static."""

    codes: Tensor
    scale: Tensor
    input_scale: Tensor | None
    bias: Tensor | None
    overlap: bool
    """Let kernels begin while the one before them ends."""

    @staticmethod
    def takes(linears: Sequence[nn.Module]) -> bool:
        """Whether all layers round their inputs alike, which go into one product then."""
        first: Any = linears[0]
        return all(
            isinstance(linear, QuantizedLinear)
            and linear.scheme.activations in ("int8", "fp8")
            and linear.scale is not None
            and linear.scheme.activations == first.scheme.activations
            and _is_same(linear.input_scale, first.input_scale)
            for linear in linears
        )

    @classmethod
    def joined(cls, linears: Sequence[QuantizedLinear], bias: Tensor | None, *, overlap: bool) -> Self:
        """Layers of one input, one above the other."""
        codes, scales = join_buffers(linears, "packed"), [linear.scale for linear in linears]
        assert codes is not None
        rows = [
            scale.to(torch.float32).expand(linear.out_features, 1)
            for linear, scale in zip(linears, scales, strict=True)
            if scale is not None
        ]
        return cls(codes, torch.cat(rows), linears[0].input_scale, bias, overlap)

    def product(self, x: Tensor) -> Tensor:
        y = rounded_linear(x, self.codes, self.scale, self.input_scale, overlap=self.overlap)
        return y if self.bias is None else y + self.bias

    def product_of_gated(self, gate_up: Weight, x: Tensor, activation: Activation) -> Tensor:
        both = gate_up.product(x)
        y = rounded_linear(both, self.codes, self.scale, self.input_scale, activation, overlap=self.overlap)
        return y if self.bias is None else y + self.bias


def _is_same(scale: Tensor | None, other: Tensor | None) -> bool:
    return scale is other or (scale is not None and other is not None and torch.equal(scale, other))
