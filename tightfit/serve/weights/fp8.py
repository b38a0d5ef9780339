"""Fp8Weight: a matrix of 8-bit floats with a scale per row; inputs are not rounded.

One token reads the codes once (kernels/quantized/fp8_vector.py): half the time of 16 bits. So do a few
(kernels/quantized/fp8_rows.py). Many are multiplied by the matrix dequantized to their dtype, anew for every product.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.kernels.decoding.decode_linear import decode_linear
from tightfit.kernels.quantized.fp8_rows import MOST_ROWS, expand_fp8, fp8_rows
from tightfit.kernels.quantized.fp8_vector import WHOLE, fp8_vector
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.serve.weights.weight import Fused, Weight, join_buffers

NEEDED = (8, 9)
"""Compute capability from which kernels can read e4m3."""


@dataclass(frozen=True, eq=False)
class Fp8Weight(Weight):
    """Codes [N, K] in e4m3, and the scale of each row [N]."""

    codes: Tensor
    scale: Tensor
    bias: Tensor | None

    @staticmethod
    def takes(linears: Sequence[nn.Module]) -> bool:
        """Whether all layers are fp8 with a scale per row and do not round their inputs."""
        return all(
            isinstance(linear, QuantizedLinear)
            and linear.scheme.kind == "fp8"
            and linear.scheme.activations is None
            and linear.scale is not None
            and tuple(linear.scale.shape) == (linear.out_features, 1)
            for linear in linears
        )

    @classmethod
    def joined(cls, linears: Sequence[QuantizedLinear], bias: Tensor | None, *, overlap: bool) -> Self:
        """Layers of one input, one above the other; kernels for several tokens do not `overlap`."""
        codes, scale = join_buffers(linears, "packed"), join_buffers(linears, "scale", arranged=Tensor.float)
        assert codes is not None
        assert scale is not None
        return cls(codes, scale[:, 0].contiguous(), bias)

    @property
    def can_decode(self) -> bool:
        """Whether this GPU's kernels can read the codes."""
        return self.codes.is_cuda and torch.cuda.get_device_capability(self.codes.device) >= NEEDED

    def product(self, x: Tensor) -> Tensor:
        if not self.can_decode or x.dtype == torch.float32:
            y = (F.linear(x, self.codes.to(x.dtype)).to(self.scale.dtype) * self.scale).to(x.dtype)
        elif len(x) <= MOST_ROWS:
            y = fp8_rows(x, self.codes, self.scale)
        else:
            y = F.linear(x, expand_fp8(self.codes, self.scale, x.dtype))
        return y if self.bias is None else y + self.bias

    def one_token(self, x: Tensor, fused: Fused) -> Tensor:
        if not self.can_decode:
            return super().one_token(x, fused)
        kept: dict[str, Any] = {"bias": self.bias, "out_dtype": fused.out_dtype, **fused.around}
        if self.codes.shape[1] % WHOLE == 0 and x.dtype == torch.bfloat16:
            return fp8_vector(x, self.codes, self.scale, activation=fused.activation or "", **kept)
        return decode_linear(x, self.codes, scale=self.scale, activation=fused.activation, **kept)
