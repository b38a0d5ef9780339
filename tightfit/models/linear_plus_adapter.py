"""LinearPlusAdapter: a linear layer that cannot be added to, its weight being packed, and what an adapter adds to it.

    y = W x + b + B (A x)        A [r, in], B [out, r] with the adapter's scale in it

So a run of adapters over a packed model is loaded as it was trained: packed. Plain layers are added to instead
(models/adapted.py). A's of layers that share an input may be one tensor, and are held once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.models.huggingface.adapter import LowRank
from tightfit.models.quantized.linear import QuantizedLinear


class LinearPlusAdapter(nn.Module):
    """`base` and the low-rank matrices `down` and `up` on top."""

    down: Tensor
    up: Tensor

    def __init__(self, base: QuantizedLinear, change: LowRank) -> None:
        super().__init__()
        self.base = base
        self.in_features, self.out_features = base.in_features, base.out_features
        self.register_buffer("down", change.down)
        self.register_buffer("up", change.up)

    @property
    def bias(self) -> nn.Parameter | None:
        """The layer's own."""
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y + F.linear(F.linear(x, self.down), self.up)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The matrix that it multiplies by: the sum, made in float32."""
        wide = self.base.dequantize(torch.float32)
        return wide.addmm_(self.up.float(), self.down.float()).to(dtype)


def base_of(layer: nn.Module) -> nn.Module:
    """The layer itself, without what an adapter adds."""
    return layer.base if isinstance(layer, LinearPlusAdapter) else layer
