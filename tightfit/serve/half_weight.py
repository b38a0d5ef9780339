"""HalfWeight: a float32 matrix of a CPU as 16-bit floats, where that loses nothing; inputs and sums stay float32.

One token reads every weight once, so half the bytes are half the time. Published checkpoints are bfloat16 mostly, and a
half-precision float holds such a number exactly from 2⁻¹⁷ on: what is below is off by 2⁻²⁵ at most. A matrix of K
columns counts as unchanged if it is off by less than float32's rounding of a sum of K terms: √K · 2⁻²⁴ of its norm.
FBGEMM inside torch has the products (x86 only). The decoder keeps its float32 weights, so this is a copy; the budget
counts it.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tightfit.kernels.glu import glu_eager
from tightfit.models.spec import Activation

ENGINES = ("x86", "fbgemm")
ROUNDING = 2.0**-24
"""Half of float32's spacing at one."""
FEWEST = 2**19
"""Elements from which half the bytes are worth a call of some 30 µs instead of 4."""


class HalfWeight(NamedTuple):
    """What torch's product takes."""

    packed: Any

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x · Wᵀ + b."""
        made: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self.packed)
        return made if bias is None else made + bias

    def gated_product(self, x: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
        """act(g) · u where the weight is gate over up."""
        gate, up = self.product(x, bias).chunk(2, dim=-1)
        return glu_eager(gate, up, activation)


def halved(weight: Tensor) -> HalfWeight | Tensor:
    """A copy of `weight` in 16 bits, or a small one itself."""
    if weight.numel() < FEWEST:
        return weight
    return HalfWeight(torch.ops.quantized.linear_prepack_fp16(weight, None))


def copy_bytes(*parts: Tensor) -> int:
    """What a copy of `parts`, joined, takes."""
    elements = sum(part.numel() for part in parts)
    return 2 * elements if elements >= FEWEST else 0


def has_products(weight: Tensor) -> bool:
    """Whether torch has them for matrices like `weight`."""
    here = weight.device.type == "cpu" and weight.dtype == torch.float32
    return here and torch.backends.quantized.engine in ENGINES


def is_exact(weight: Tensor) -> bool:
    """Whether 16 bits are off by less than float32's rounding of a product, all elements together."""
    off = torch.linalg.vector_norm(weight.half().float() - weight)
    return bool(off <= ROUNDING * math.sqrt(weight.shape[1]) * torch.linalg.vector_norm(weight))
