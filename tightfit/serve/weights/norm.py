"""Norm: RMSNorm before or after the products of a step, x / √(mean(x²) + ε) · (w + offset)."""

import math
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from tightfit.kernels.norm.rms_norm import rms_norm
from tightfit.kernels.triton_support import use_triton
from tightfit.models.spec import ModelSpec


class RowNorm(NamedTuple):
    """RMSNorm over rows of W numbers in few calls of torch, as for few tokens calls take longer than their arithmetic:
    x / hypot(‖x‖, √(Wε)) · w√W."""

    scaled: Tensor
    least: Tensor

    @classmethod
    def of(cls, weight: Tensor, offset: float, eps: float) -> Self:
        """The norm with a module's weight, offset and ε."""
        width = weight.numel()
        return cls((weight.detach() + offset) * math.sqrt(width), torch.tensor(math.sqrt(width * eps)))

    def __call__(self, x: Tensor) -> Tensor:
        """Of x [..., W]."""
        return x.div(torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self.least)).mul_(self.scaled)


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm of the model; `row_norm` computes it on a CPU."""

    weight: Tensor
    eps: float
    offset: float
    on_cpu: bool
    overlap: bool
    """Let its kernel begin while the one before it ends."""
    row_norm: RowNorm | None

    @classmethod
    def of(cls, norm: nn.Module, spec: ModelSpec, *, overlap: bool) -> Self:
        """The norm of the module `norm`, in a model of `spec`."""
        weight, offset = norm.weight, 1.0 if spec.norm == "rms_plus_one" else 0.0
        assert isinstance(weight, Tensor)
        on_cpu = weight.device.type == "cpu" and not use_triton("auto", weight)
        row_norm = RowNorm.of(weight, offset, spec.norm_eps) if on_cpu and weight.dtype == torch.float32 else None
        return cls(weight, spec.norm_eps, offset, on_cpu, overlap, row_norm)

    def __call__(self, x: Tensor) -> Tensor:
        """Of x [..., W]."""
        if self.row_norm is not None:
            return self.row_norm(x)
        return rms_norm(x, self.weight, self.eps, offset=self.offset, overlap=self.overlap)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and that sum."""
        if self.on_cpu:
            s = x + residual
            return self(s), s
        return rms_norm(x, self.weight, self.eps, offset=self.offset, residual=residual, overlap=self.overlap)
