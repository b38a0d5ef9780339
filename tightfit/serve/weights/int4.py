"""Int4Weight: a matrix of 4-bit codes as a step on a CPU multiplies by it, and several of them as one.

Steps of up to 256 tokens read the codes as they are packed, with inputs, scales and results in bfloat16
(kernels/int4_linear.py); larger ones expand them and multiply in float32, as the layers do everywhere else.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.kernels.glu import glu_eager
from tightfit.kernels.int4_linear import MOST_ROWS, int4_product, unpack_int4
from tightfit.models.decoder import Decoder
from tightfit.models.quantized.coded_weight import scaled
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.spec import Activation


class Int4Weight(NamedTuple):
    """Codes [N, K / 2] in torch's order, rounded scales for them, and the exact ones [N, groups]."""

    codes: Tensor
    cpu_scales: Tensor
    scale: Tensor
    zero: Tensor | None
    middle: int
    group: int
    multiply: Any

    @property
    def inputs(self) -> int:
        """Columns of the matrix."""
        return 2 * self.codes.shape[1]

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x · Wᵀ + b."""
        made: Tensor
        if x.shape[0] <= MOST_ROWS:  # as int4_linear, in fewer calls
            made = self.multiply(x.to(torch.bfloat16), self.codes, self.group, self.cpu_scales).to(x.dtype)
        else:
            made = F.linear(x, self._expanded(x.dtype))
        return made if bias is None else made + bias

    def gated_product(self, x: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
        """act(g) · u where the weight is gate over up."""
        gate, up = self.product(x, bias).chunk(2, dim=-1)
        return glu_eager(gate, up, activation)

    def _expanded(self, dtype: torch.dtype) -> Tensor:
        zero = self.middle if self.zero is None else self.zero.float()
        return scaled(unpack_int4(self.codes).float(), self.scale.float(), zero, None).to(dtype)


def rounds_products(model: Decoder) -> bool:
    """Whether layers of a model are held so."""
    return any(isinstance(layer, QuantizedLinear) and layer.cpu_scales is not None for layer in model.modules())


def is_int4(linears: Sequence[nn.Module]) -> bool:
    """Whether layers of one input are held for a CPU, and coded alike."""
    first = linears[0]
    return all(
        isinstance(linear, QuantizedLinear)
        and linear.cpu_scales is not None
        and linear.scheme == first.scheme
        and linear.scale is not None
        and (linear.zero is None) == (first.zero is None)
        for linear in linears
    )


def join_int4(linears: Sequence[QuantizedLinear]) -> Int4Weight:
    """One above the other; the layers' own buffers become views of it, so that nothing is held twice."""
    first = linears[0]
    codes, scale, zero = (_joined(linears, name) for name in ("packed", "scale", "zero"))
    cpu_scales = _joined(linears, "cpu_scales", dim=1)
    assert codes is not None
    assert scale is not None
    assert cpu_scales is not None
    return Int4Weight(codes, cpu_scales, scale, zero, first.scheme.middle, first.scheme.group, int4_product())


def _joined(linears: Sequence[QuantizedLinear], name: str, dim: int = 0) -> Tensor | None:
    parts = [getattr(linear, name) for linear in linears]
    if parts[0] is None or len(parts) == 1:
        return parts[0]
    joint = torch.cat(parts, dim)
    for linear, part in zip(linears, joint.split([linear.out_features for linear in linears], dim), strict=True):
        setattr(linear, name, part)
    return joint
