"""LinearPlusAdapter: a linear layer whose packed weight cannot be changed, and an adapter as a branch beside it.

    y = W x + b + B (A x)        A [r, in], B [out, r] with the adapter's scale in it

So an adapter that was trained on a packed model is loaded as it was trained: with packed weights. Plain weights get B A
added instead (models/adapted.py). Layers that share an input may share one tensor A.
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
        """The bias of `base`."""
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y + F.linear(F.linear(x, self.down), self.up)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """W + B A, summed in float32."""
        wide = self.base.dequantize(torch.float32)
        return wide.addmm_(self.up.float(), self.down.float()).to(dtype)


def base_of(layer: nn.Module) -> nn.Module:
    """The layer without the adapter beside it."""
    return layer.base if isinstance(layer, LinearPlusAdapter) else layer
