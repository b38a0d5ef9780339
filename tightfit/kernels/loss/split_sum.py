"""Sums in 24 bits: the upper 16 bits of a float32, which are a bf16, and the 8 bits below them in another tensor.

A gradient that is summed over chunks needs more than bf16's 8 bits of mantissa: partial sums in bf16 double its error
at eight chunks. It does not need float32's 24: with 16, an addition rounds by at most 2⁻¹⁷ of the sum, and the result
is rounded to bf16 in the end. Three bytes a number instead of four, and the upper two become the result in place:

    float32 sums, then a bf16 copy: 4 + 2 bytes        24-bit sums, rounded in place: 3 bytes

Products come in float32, a block of rows at a time, in memory of the caller's. Bits are added and rounded as integers.
"""

import torch
from torch import Tensor

from tightfit.kernels.operators import on_device_of
from tightfit.kernels.triton_support import tl, triton
from tightfit.levers.policy.loss_chunks import product_rows

BLOCK = 4096


class SplitSum:
    """A sum of the shape of the matrix `like`: `high` int16, the bits of a bf16, and `low` uint8."""

    def __init__(self, like: Tensor) -> None:
        self.high = torch.empty(like.shape, device=like.device, dtype=torch.int16)
        self.low = torch.empty(like.shape, device=like.device, dtype=torch.uint8)
        self.is_empty = True

    def add_product(self, left: Tensor, right: Tensor, scratch: Tensor) -> None:
        """Add left · right, computed in float32 in the flat `scratch`; `left` is [rows, n] and may be a view."""
        rows, width = product_rows(*self.high.shape), right.shape[1]
        room = scratch.view(torch.float32)
        for start in range(0, len(left), rows):
            part = left[start : start + rows]
            product = room[: len(part) * width].view(len(part), width)
            if right.is_cuda:
                torch.mm(part, right, out_dtype=torch.float32, out=product)
            else:
                torch.mm(part.float(), right.float(), out=product)
            self.add(start, product)
        self.is_empty = False

    def add(self, start: int, product: Tensor) -> None:
        """Add contiguous float32 rows that begin at row `start`."""
        here = slice(start, start + len(product))
        with on_device_of(product):
            split_add_kernel[(triton.cdiv(product.numel(), BLOCK),)](
                product, self.high[here], self.low[here], product.numel(), FIRST=self.is_empty, BLOCK=BLOCK
            )

    def rounded(self, factor: Tensor, *, in_place: bool) -> Tensor:
        """The sum times the one-element tensor `factor` in bf16; `in_place`, it is this sum's own memory."""
        return round_split(self.high, self.low, factor, in_place=in_place)


def round_split(high: Tensor, low: Tensor, factor: Tensor, *, in_place: bool) -> Tensor:
    """See SplitSum.rounded."""
    out = high if in_place else torch.empty_like(high)
    with on_device_of(high):
        split_round_kernel[(triton.cdiv(high.numel(), BLOCK),)](high, low, factor, out, high.numel(), BLOCK=BLOCK)
    return out.view(torch.bfloat16)


@triton.jit
def _wide(high, low):  # type: ignore[no-untyped-def]
    """The float32 whose upper 24 bits are these."""
    return ((high.to(tl.int32) << 16) | (low.to(tl.int32) << 8)).to(tl.float32, bitcast=True)


@triton.jit
def _plus(bits, more):  # type: ignore[no-untyped-def]
    """A float's bits with more added to its mantissa; infinity and NaN as they are, or a carry would make them -0."""
    return tl.where((bits & 0x7F800000) == 0x7F800000, bits, bits + more)


@triton.jit
def split_add_kernel(product, high, low, count, FIRST: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One block of elements: the sum so far plus the product, to the nearest 24 bits."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.load(product + at, mask=inside, other=0.0, eviction_policy="evict_first")
    if not FIRST:
        upper = tl.load(high + at, mask=inside, other=0)
        total += _wide(upper, tl.load(low + at, mask=inside, other=0))
    bits = _plus(total.to(tl.int32, bitcast=True), 128)
    tl.store(high + at, (bits >> 16).to(tl.int16), mask=inside)
    tl.store(low + at, ((bits >> 8) & 255).to(tl.uint8), mask=inside)


@triton.jit
def split_round_kernel(high, low, factor, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One block of elements times the factor, as the bits of the nearest bf16 (the even one of two as near)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    upper = tl.load(high + at, mask=inside, other=0)
    bits = (_wide(upper, tl.load(low + at, mask=inside, other=0)) * tl.load(factor)).to(tl.int32, bitcast=True)
    bits = _plus(bits, 32767 + ((bits >> 16) & 1))
    tl.store(out + at, (bits >> 16).to(tl.int16), mask=inside)
