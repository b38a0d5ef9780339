"""Int4Weight: a matrix of 4-bit codes as a step on a CPU multiplies by it.

Steps of up to 256 tokens multiply by the packed codes, with inputs, scales and results in bfloat16
(kernels/quantized/int4_linear.py); larger ones dequantize them and multiply in float32, as the layers do everywhere
else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.kernels.quantized.int4_linear import MOST_ROWS, int4_product, unpack_int4
from tightfit.models.decoder import Decoder
from tightfit.models.quantized.coded_weight import scaled
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.serve.weights.weight import Weight, join_buffers


@dataclass(frozen=True, eq=False)
class Int4Weight(Weight):
    """Codes [N, K / 2] in torch's order, bfloat16 scales for torch's product, and the exact scales [N, groups]."""

    codes: Tensor
    cpu_scales: Tensor
    scale: Tensor
    zero: Tensor | None
    middle: int
    group: int
    multiply: Callable[..., Tensor]
    bias: Tensor | None

    @staticmethod
    def takes(linears: Sequence[nn.Module]) -> bool:
        """Whether all layers are 4-bit, prepared for a CPU (cpu_codes.py), and of one scheme."""
        first = linears[0]
        return all(
            isinstance(linear, QuantizedLinear)
            and linear.cpu_scales is not None
            and linear.scheme == first.scheme
            and linear.scale is not None
            and (linear.zero is None) == (first.zero is None)
            for linear in linears
        )

    @classmethod
    def joined(cls, linears: Sequence[QuantizedLinear], bias: Tensor | None, *, overlap: bool) -> Self:
        """Layers of one input, one above the other; a CPU has nothing to `overlap`."""
        codes, scale, zero = (join_buffers(linears, name) for name in ("packed", "scale", "zero"))
        cpu_scales, scheme = join_buffers(linears, "cpu_scales", dim=1), linears[0].scheme
        assert codes is not None
        assert scale is not None
        assert cpu_scales is not None
        return cls(codes, cpu_scales, scale, zero, scheme.middle, scheme.group, int4_product(), bias)

    def product(self, x: Tensor) -> Tensor:
        if x.shape[0] <= MOST_ROWS:  # as int4_linear, in fewer calls
            y = self.multiply(x.to(torch.bfloat16), self.codes, self.group, self.cpu_scales).to(x.dtype)
        else:
            y = F.linear(x, self._expanded(x.dtype))
        return y if self.bias is None else y + self.bias

    def _expanded(self, dtype: torch.dtype) -> Tensor:
        zero = self.middle if self.zero is None else self.zero.float()
        return scaled(unpack_int4(self.codes).float(), self.scale.float(), zero, None).to(dtype)


def rounds_products(model: Decoder) -> bool:
    """Whether any layer of a model is multiplied so, rounded to bfloat16."""
    return any(isinstance(layer, QuantizedLinear) and layer.cpu_scales is not None for layer in model.modules())
