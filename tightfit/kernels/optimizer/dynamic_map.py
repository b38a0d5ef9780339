"""Dynamic 8-bit quantization of numbers from 0 to 1: fine near 1, and still not zero at a millionth.

Codes from 2ⁱ to 2ⁱ⁺¹ − 1 divide a decade evenly, and each decade has twice as many codes as the one below:

    value(c) = 10^(i − D + 1) · (0.1 + 0.9 · (c − 2ⁱ + 1) / 2ⁱ)        i = ⌊log₂ c⌋, D decades        value(0) = 0

This is the map of Dettmers et al. 2021 with values at the ends of their intervals instead of the middles: 1, the
largest number of every block, is exact, and rounding to the nearest code takes a few additions and comparisons instead
of a table search. Linear codes would be worse: moments in one block differ by orders of magnitude, and a second moment
rounded to zero makes an update explode. D is 7 for signed codes (127 values) and 8 for unsigned ones (255).
"""

from functools import lru_cache

import torch
from torch import Tensor

from tightfit.kernels.triton_support import tl, triton

SIGNED, UNSIGNED = 7, 8
"""Decades of signed and of unsigned codes."""


@lru_cache
def _numbers(decades: int) -> tuple[float, ...]:
    """The value of every code; cached as numbers, as a cached tensor might be real among fake ones or the reverse."""
    values = [0.0]
    for i in range(decades):
        values += [10.0 ** (i - decades + 1) * (0.1 + 0.9 * (j + 1) / 2**i) for j in range(2**i)]
    return tuple(values)


def table(decades: int, device: torch.device | str = "cpu") -> Tensor:
    """The value of every code, ascending, in float32."""
    return torch.tensor(_numbers(decades), dtype=torch.float32, device=device)


def encode(x: Tensor, decades: int) -> Tensor:
    """The nearest codes (int64) of numbers from 0 to 1."""
    values = table(decades, x.device)
    return torch.bucketize(x, (values[1:] + values[:-1]) / 2, right=True)


def decode(codes: Tensor, decades: int) -> Tensor:
    """The values of codes, float32."""
    return table(decades, codes.device)[codes.long()]


@triton.jit
def encoded(x, DECADES: tl.constexpr):  # type: ignore[no-untyped-def]
    """`encode` inside a kernel: int32 codes."""
    i = tl.full(x.shape, DECADES - 1, tl.int32)
    for _ in tl.static_range(DECADES - 1):
        small = x <= 0.1
        x = tl.where(small, x * 10, x)
        i = tl.where(small, i - 1, i)
    levels = 1 << i
    return levels - 1 + tl.floor((x - 0.1) * (levels.to(tl.float32) / 0.9) + 0.5).to(tl.int32)


@triton.jit
def decoded(codes, DECADES: tl.constexpr):  # type: ignore[no-untyped-def]
    """`decode` inside a kernel, of int32 codes."""
    number = codes.to(tl.float32)
    bits = number.to(tl.int32, bitcast=True)
    levels = tl.maximum((bits & 0x7F800000).to(tl.float32, bitcast=True), 1.0)  # the power of two up to the code
    i = (bits >> 23) - 127
    x = 0.1 + 0.9 * (number - levels + 1) / levels
    for power in tl.static_range(DECADES - 1):
        x = tl.where(i <= power, x * 0.1, x)
    return tl.where(codes == 0, 0.0, x)
