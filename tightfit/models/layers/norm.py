"""The norms of the supported families: RMSNorm, Gemma's RMSNorm (weights stored minus one), LayerNorm.

With `residual` the kernel adds it first and returns (norm(x + residual), x + residual): no separate pass for the sum.
"""

import torch
from torch import Tensor, nn

from tightfit.kernels.norm.layer_norm import layer_norm
from tightfit.kernels.norm.rms_norm import rms_norm
from tightfit.kernels.triton_support import Impl
from tightfit.models.spec import ModelSpec


class RmsNorm(nn.Module):
    """x / √(mean(x²) + ε) · (weight + offset), over the last dimension."""

    def __init__(self, size: int, eps: float, offset: float, impl: Impl = "auto") -> None:
        super().__init__()
        self.eps, self.offset, self.impl = eps, offset, impl
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        return rms_norm(x, self.weight, self.eps, offset=self.offset, residual=residual, impl=self.impl)


class LayerNorm(nn.Module):
    """(x − mean(x)) / √(var(x) + ε) · weight + bias, over the last dimension."""

    def __init__(self, size: int, eps: float, impl: Impl = "auto") -> None:
        super().__init__()
        self.eps, self.impl = eps, impl
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        return layer_norm(x, self.weight, self.bias, self.eps, residual=residual, impl=self.impl)


def make_norm(spec: ModelSpec, impl: Impl, size: int | None = None) -> nn.Module:
    """The norm of `spec`'s family, over the hidden size unless `size` is given."""
    size = spec.hidden_size if size is None else size
    if spec.norm == "layer":
        return LayerNorm(size, spec.norm_eps, impl)
    return RmsNorm(size, spec.norm_eps, 1.0 if spec.norm == "rms_plus_one" else 0.0, impl)
