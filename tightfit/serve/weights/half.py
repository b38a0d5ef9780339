"""HalfWeight: a float32 matrix of a CPU as 16-bit floats, where that loses nothing; inputs and sums stay float32.

One token reads every weight once, so half the bytes are half the time. Published checkpoints are bfloat16 mostly, and a
half-precision float holds such a number exactly from 2⁻¹⁷ on: what is below is off by 2⁻²⁵ at most. A matrix of K
columns counts as unchanged if it is off by less than float32's rounding of a sum of K terms: √K · 2⁻²⁴ of its norm.
Where a model's other products round to bfloat16 anyway (int4.py), 2⁻¹¹ of its norm is little enough.
FBGEMM inside torch has the products; used on x86 alone, as those for Arm end the process where the CPU lacks one of
their instructions. The decoder keeps its float32 weights, so this is a copy; the budget counts it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tightfit.plan.serving.cpu_weights import FEWEST_COPIED
from tightfit.serve.weights.weight import PlainWeight, Weight

ENGINES = ("x86", "fbgemm")
CPUS = ("AVX2", "AVX512")
ROUNDING = 2.0**-24
"""Half of float32's spacing at one."""
HALF_ROUNDING = 2.0**-11
"""Half of float16's spacing at one."""
TINY = 1e-30

PIECE_ROWS = 8192
"""Rows packed at a time: FBGEMM takes twice as long for 49,152 rows at once."""


@dataclass(frozen=True, eq=False)
class HalfWeight(Weight):
    """A matrix packed for torch's 16-bit product, and that product itself: looked up once, as a call through
    `torch.ops` looks at every argument, which takes as long as a small norm."""

    pieces: tuple[Any, ...]
    """Packed matrices of `PIECE_ROWS` rows each, or fewer."""
    multiply: Callable[..., Tensor]
    bias: Tensor | None
    packed_bytes: int
    """Bytes of `pieces`, which are no tensors."""

    def product(self, x: Tensor) -> Tensor:
        parts = [self.multiply(x, piece) for piece in self.pieces]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return y if self.bias is None else y + self.bias


def halved(plain: PlainWeight) -> Weight:
    """A copy of `plain` in 16 bits, or a small one itself."""
    if plain.matrix.numel() < FEWEST_COPIED:
        return plain
    pieces = tuple(torch.ops.quantized.linear_prepack_fp16(piece, None) for piece in plain.matrix.split(PIECE_ROWS))
    product = torch.ops.quantized.linear_dynamic_fp16.default._op
    return HalfWeight(pieces, product, plain.bias, packed_bytes=copy_bytes(plain.matrix))


def copy_bytes(*parts: Tensor) -> int:
    """Bytes of a 16-bit copy of `parts`, joined; 0 where they are too small for one."""
    elements = sum(part.numel() for part in parts)
    return 2 * elements if elements >= FEWEST_COPIED else 0


def has_products(weight: Tensor) -> bool:
    """Whether torch has 16-bit products for matrices like `weight` here."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and cpu_has_products()


def cpu_has_products() -> bool:
    """Whether torch's 16-bit products run on this CPU."""
    return torch.backends.quantized.engine in ENGINES and torch.backends.cpu.get_cpu_capability() in CPUS


def is_exact(weight: Tensor) -> bool:
    """Whether 16 bits are off by less than float32's rounding of a product, all elements together."""
    return _off(weight) <= ROUNDING * math.sqrt(weight.shape[1])


def is_near(weight: Tensor) -> bool:
    """Whether 16 bits are off by no more than their own spacing: nothing is too large or too small for them."""
    return _off(weight) <= HALF_ROUNDING


def _off(weight: Tensor) -> float:
    """The part of the weight's norm that 16 bits lose."""
    weight = weight.detach()
    off = torch.linalg.vector_norm(weight.half().float() - weight)
    return float(off / torch.linalg.vector_norm(weight).clamp(min=TINY))
