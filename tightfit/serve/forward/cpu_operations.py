"""Rotary positions in few calls of torch: for the few tokens of a decoding step on a CPU a call takes longer than its
arithmetic, and a layer of the plain kind makes some forty."""

import torch
from torch import Tensor

from tightfit.models.spec import Rope


def turns(ropes: dict[Rope, tuple[Tensor, Tensor]]) -> dict[Rope, tuple[Tensor, Tensor]]:
    """cos and sin [1, 1, N, d/2] of each rope in the form that `turn_rows` takes, [N, 1, 2, d/2]."""
    turned = {}
    for rope, (cos, sin) in ropes.items():
        cos, sin = cos[0, 0, :, None], sin[0, 0, :, None]
        turned[rope] = torch.stack((cos, cos), dim=2), torch.stack((-sin, sin), dim=2)
    return turned


def turn_rows(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate x [N, heads, D] in place: pairs (i, i + d/2), elements beyond d stay."""
    pairs = x[..., : 2 * cos.shape[-1]].unflatten(-1, (2, -1))
    swapped = pairs.flip(-2)
    pairs.mul_(cos).addcmul_(swapped, sin)
