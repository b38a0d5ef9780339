"""RMSNorm (Zhang and Sennrich 2019), optionally with the residual addition before it in the same pass.

    y = s / √(mean(s²) + ε) · (weight + offset),  s = x + residual

Statistics and the product with the weight are float32 and rounded once. `offset` is Gemma's 1: its weights are stored
minus one, and adding it in bfloat16, whose steps near one are 1/128, would round most of them away.
A separate addition and norm make 11 passes over the activations forward and backward; one operation makes 8.
"""

from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.kernels.norm.row_norm import WIDEST, row_norm
from tightfit.kernels.triton_support import Impl, use_triton


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = ...,
    residual: None = None,
    overlap: bool = ...,
    impl: Impl = ...,
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = ...,
    residual: Tensor,
    overlap: bool = ...,
    impl: Impl = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = ...,
    residual: Tensor | None = ...,
    overlap: bool = ...,
    impl: Impl = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    residual: Tensor | None = None,
    overlap: bool = False,
    impl: Impl = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """y over the last dimension of x [..., W], of any strides; with `residual` [..., W], y and s = x + residual.

    With `overlap` (kernels/overlap.py) the kernel may begin while the one before it ends.
    """
    if use_triton(impl, x) and x.shape[-1] <= WIDEST:
        y, s, _ = row_norm(x, weight, None, residual, eps, offset, False, overlap)
        return y if residual is None else (y, s)
    if residual is None:
        return _plain(x, weight, eps, offset)
    s = x + residual
    return _plain(s, weight, eps, offset), s


def _plain(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """torch's own operation, which has no offset and needs one dtype."""
    if not offset and weight.dtype == x.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), weight.shape, weight.to(wide) + offset, eps).to(x.dtype)


def rms_norm_eager(
    x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The reference: y and s, step by step."""
    s = x if residual is None else x + residual
    wide = s.to(torch.promote_types(s.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * (weight.to(wide.dtype) + offset)).to(s.dtype), s
