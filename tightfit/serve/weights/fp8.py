"""Fp8Weight: a matrix of 8-bit floats as a serving step multiplies by it, inputs as they are.

One token reads the codes once (kernels/fp8_vector.py): half the time of 16 bits. So do some (kernels/fp8_rows.py). Many
are multiplied by the matrix in their own dtype, made anew for every product.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.kernels.fp8_rows import MOST_ROWS, expand_fp8, fp8_rows
from tightfit.kernels.fp8_vector import CHUNK
from tightfit.kernels.glu import glu
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.spec import Activation

NEEDED = (8, 9)
"""Compute capability from which kernels can read e4m3."""


class Fp8Weight(NamedTuple):
    """Codes [N, K] in e4m3, and the scale of each row [N]."""

    codes: Tensor
    scale: Tensor

    @property
    def inputs(self) -> int:
        """Columns of the matrix."""
        return self.codes.shape[1]

    @property
    def can_decode(self) -> bool:
        """Whether this GPU's kernels can read the codes."""
        return self.codes.is_cuda and torch.cuda.get_device_capability(self.codes.device) >= NEEDED

    def takes_vector(self, dtype: torch.dtype) -> bool:
        """Whether kernels/fp8_vector.py multiplies one token by it."""
        return self.can_decode and self.inputs % CHUNK == 0 and dtype == torch.bfloat16

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x · Wᵀ + b."""
        if not self.can_decode or x.dtype == torch.float32:
            made = (F.linear(x, self.codes.to(x.dtype)).to(self.scale.dtype) * self.scale).to(x.dtype)
        elif len(x) <= MOST_ROWS:
            made = fp8_rows(x, self.codes, self.scale)
        else:
            made = F.linear(x, expand_fp8(self.codes, self.scale, x.dtype))
        return made if bias is None else made + bias

    def gated_product(self, x: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
        """act(g) · u where the weight is gate over up."""
        gate, up = self.product(x, bias).chunk(2, dim=-1)
        return glu(gate, up, activation)


def is_fp8(linears: Sequence[nn.Module]) -> bool:
    """Whether layers are coded as 8-bit floats with a scale a row, their inputs not rounded."""
    return all(
        isinstance(linear, QuantizedLinear)
        and linear.scheme.kind == "fp8"
        and linear.scheme.activations is None
        and linear.scale is not None
        and tuple(linear.scale.shape) == (linear.out_features, 1)
        for linear in linears
    )


def join_fp8(linears: Sequence[QuantizedLinear]) -> Fp8Weight:
    """One above the other; the layers' own buffers become views of it, so that nothing is held twice."""
    codes = torch.cat([linear.packed for linear in linears]) if len(linears) > 1 else linears[0].packed
    scales = [linear.scale.float() for linear in linears if linear.scale is not None]
    scale = torch.cat(scales) if len(scales) > 1 else scales[0]
    sizes = [linear.out_features for linear in linears]
    for linear, part, own in zip(linears, codes.split(sizes), scale.split(sizes), strict=True):
        linear.packed, linear.scale = part, own
    return Fp8Weight(codes=codes, scale=scale[:, 0].contiguous())
