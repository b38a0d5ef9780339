"""Norms over a last dimension that is split over ranks, which combine at most two numbers per row.

| | forward sends | backward sends |
|---|---|---|
| RMSNorm | Σ x², all-reduced | Σ dy · w · x, all-reduced |
| LayerNorm | mean and Σ (x − mean)² of each part, all-gathered | Σ g and Σ g · x̂ with g = dy · w, all-reduced |

LayerNorm's parts are combined as Chan et al. (1983) do, because Σ x² − n · mean² cancels. Statistics and products are
float32 and rounded once, as in kernels/norm/rms_norm.py; x and one or two numbers per row are saved. A weight's
gradient covers this rank's rows only, and is to be summed over the ranks with other rows.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup


def split_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, group: Group) -> Tensor:
    """x / √(mean(x²) + ε) · (weight + offset); x [..., W/q] and weight [W/q] are this rank's part of the rows."""
    return _SplitRmsNorm.apply(x, weight, eps, offset, group)


def split_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, group: Group) -> Tensor:
    """(x − mean(x)) / √(var(x) + ε) · weight + bias; all are this rank's part of the rows."""
    return _SplitLayerNorm.apply(x, weight, bias, eps, group)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _sum_rows(x: Tensor) -> Tensor:
    """The sum over all but the last dimension."""
    return x.flatten(0, -2).sum(0)


class _SplitRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, group: Group) -> Tensor:
        wide = _wide(x)
        squares = wide.square().sum(-1, keepdim=True)
        dist.all_reduce(squares, group=group)
        scale = (squares / (x.shape[-1] * group.size()) + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        ctx.offset, ctx.group = offset, group
        return (wide * scale * (_wide(weight) + offset)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed, dy = _wide(x) * scale, _wide(dy)
        dweight = _sum_rows(dy * normed).to(weight.dtype)
        dnormed = dy * (_wide(weight) + ctx.offset)
        mean = (dnormed * normed).sum(-1, keepdim=True)
        dist.all_reduce(mean, group=ctx.group)
        mean /= x.shape[-1] * ctx.group.size()
        return (scale * (dnormed - normed * mean)).to(x.dtype), dweight, None, None, None


class _SplitLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, group: Group) -> Tensor:
        wide = _wide(x)
        mean, variance = _moments(wide, group)
        scale = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.group = group
        return ((wide - mean) * scale * _wide(weight) + _wide(bias)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        normed, dy = (_wide(x) - mean) * scale, _wide(dy)
        dweight, dbias = _sum_rows(dy * normed).to(weight.dtype), _sum_rows(dy).to(weight.dtype)
        dnormed = dy * _wide(weight)
        means = torch.stack([dnormed.sum(-1, keepdim=True), (dnormed * normed).sum(-1, keepdim=True)])
        dist.all_reduce(means, group=ctx.group)
        means /= x.shape[-1] * ctx.group.size()
        return (scale * (dnormed - means[0] - normed * means[1])).to(x.dtype), dweight, dbias, None, None


def _moments(x: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Mean and variance [..., 1] of rows of which every rank has an equal part."""
    mean = x.mean(-1, keepdim=True)
    own = torch.stack([mean, (x - mean).square().mean(-1, keepdim=True)])
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    means, variances = torch.stack(parts, dim=1).unbind()
    mean = means.mean(0)
    return mean, variances.mean(0) + (means - mean).square().mean(0)
