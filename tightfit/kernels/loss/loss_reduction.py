"""The reduction of `cross_entropy` and `linear_cross_entropy`: sum, mean over counted labels, or sum / divisor.

The divisor is a tensor on the device, so that nothing is copied to the host; it is known before the first row is read,
so gradients are computed already divided.
"""

from typing import Literal

import torch
from torch import Tensor

from tightfit.errors import UserError

Reduction = Literal["sum", "mean", "none"]


def wide(x: Tensor) -> torch.dtype:
    """The dtype in which losses and weight gradients are summed: float32, or float64 for a float64 model."""
    return torch.promote_types(x.dtype, torch.float32)


def check_reduction(reduction: str, divisor: float | Tensor | None) -> None:
    """Refuse a reduction that does not exist, and a divisor where nothing is summed or that is no positive number."""
    if reduction not in ("sum", "mean", "none"):
        raise UserError(f"reduction is {reduction!r}; give sum, mean or none")
    if divisor is not None and reduction != "sum":
        raise UserError(f"divisor divides the sum; it does not go with reduction={reduction!r}")
    if isinstance(divisor, int | float) and divisor <= 0:
        raise UserError(f"divisor is {divisor}; give a positive number")


def divisor_of(
    labels: Tensor, ignore_index: int, reduction: Reduction, divisor: float | Tensor | None, like: Tensor
) -> Tensor:
    """The divisor of the sum, on the device. A mean over no labels is 0, where torch's is NaN."""
    if reduction == "mean":
        return (labels != ignore_index).sum().clamp(min=1).to(wide(like))
    if isinstance(divisor, Tensor):
        return divisor.detach().to(like.device, wide(like), non_blocking=True).reshape(())
    return torch.full((), 1.0 if divisor is None else divisor, device=like.device, dtype=wide(like))
