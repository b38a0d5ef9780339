"""LayerNorm (Ba et al. 2016), optionally with the residual addition before it in the same pass.

    y = (s − mean(s)) / √(var(s) + ε) · weight + bias,  s = x + residual

Statistics are float32 and the variance is that of the centred row: E[s²] − E[s]² would cancel for rows far from zero.
"""

from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.kernels.norm.row_norm import WIDEST, row_norm
from tightfit.kernels.triton_support import Impl, use_triton


@overload
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, residual: None = None, impl: Impl = ...
) -> Tensor: ...
@overload
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, residual: Tensor, impl: Impl = ...
) -> tuple[Tensor, Tensor]: ...
@overload
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, residual: Tensor | None = ..., impl: Impl = ...
) -> Tensor | tuple[Tensor, Tensor]: ...
def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    residual: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """y over the last dimension of x [..., W], of any strides; with `residual` [..., W], y and s = x + residual."""
    if use_triton(impl, x) and x.shape[-1] <= WIDEST:
        y, s, _ = row_norm(x, weight, bias, residual, eps, 0.0, True, False)
        return y if residual is None else (y, s)
    s = x if residual is None else x + residual
    y = F.layer_norm(s, weight.shape, weight, bias, eps)
    return y if residual is None else (y, s)


def layer_norm_eager(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The reference: y and s, step by step."""
    s = x if residual is None else x + residual
    wide = s.to(torch.promote_types(s.dtype, torch.float32))
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)
    return (y if bias is None else y + bias.to(wide.dtype)).to(s.dtype), s
