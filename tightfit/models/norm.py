"""The norms of the supported families: RMSNorm, Gemma's RMSNorm with weights stored minus one, LayerNorm."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.models.spec import ModelSpec


class RmsNorm(nn.Module):
    """x / √(mean(x²) + ε) · (weight + offset), over the last dimension."""

    def __init__(self, size: int, eps: float, offset: float) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))

    def forward(self, x: Tensor) -> Tensor:
        if not self.offset:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # In float32: near one, bfloat16 has steps of 1/128 and would swallow most of what these weights say.
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(wide) + self.offset
        return F.rms_norm(x.to(wide), weight.shape, weight, self.eps).to(x.dtype)


def make_norm(spec: ModelSpec, size: int | None = None) -> nn.Module:
    """The norm `spec` asks for, over the hidden size unless `size` is given."""
    size = spec.hidden_size if size is None else size
    if spec.norm == "layer":
        return nn.LayerNorm(size, eps=spec.norm_eps)
    return RmsNorm(size, spec.norm_eps, 1.0 if spec.norm == "rms_plus_one" else 0.0)
