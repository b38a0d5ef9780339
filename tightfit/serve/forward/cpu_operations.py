"""What stands between the products of a step on a CPU, in few calls: for a token or sixteen a call of torch takes
longer than its arithmetic, and a layer of the plain kind makes some forty."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tightfit.models.spec import Rope


class RowNorm(NamedTuple):
    """RMSNorm over rows of W numbers: x / hypot(‖x‖, √(Wε)) · w√W, which is x / √(mean(x²) + ε) · w."""

    scaled: Tensor
    least: Tensor

    @classmethod
    def of(cls, weight: Tensor, offset: float, eps: float) -> "RowNorm":
        """That of a model's weight."""
        width = weight.numel()
        return cls((weight.detach() + offset) * math.sqrt(width), torch.tensor(math.sqrt(width * eps)))

    def __call__(self, x: Tensor) -> Tensor:
        """Of x [..., W]."""
        return x.div(torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self.least)).mul_(self.scaled)


def turns(ropes: dict[Rope, tuple[Tensor, Tensor]]) -> dict[Rope, tuple[Tensor, Tensor]]:
    """cos and sin [1, 1, N, d/2] of ropes as `turn_rows` takes them, [N, 1, 2, d/2]."""
    made = {}
    for rope, (cos, sin) in ropes.items():
        cos, sin = cos[0, 0, :, None], sin[0, 0, :, None]
        made[rope] = torch.stack((cos, cos), dim=2), torch.stack((-sin, sin), dim=2)
    return made


def turn_rows(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate x [N, heads, D] in place: pairs (i, i + d/2), elements beyond d stay."""
    pairs = x[..., : 2 * cos.shape[-1]].unflatten(-1, (2, -1))
    swapped = pairs.flip(-2)
    pairs.mul_(cos).addcmul_(swapped, sin)
