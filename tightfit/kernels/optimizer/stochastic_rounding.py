"""Stochastic rounding of float32 to bfloat16: up or down at random, so that the mean is the number itself.

    rounded(x) = the next of bf16 away from zero with probability (|x| − below) / (above − below), else that towards it

bf16 has 8 bits of precision: added to a weight, an update of less than 1/512 of it is lost when rounded to nearest, and
a weight without a float32 master stops moving. Rounded like this it moves by the right amount on average (Gupta et al.
2015; Zamirai et al. 2020). A bf16 number is the upper half of a float32, so 16 random bits are added to the lower half
and this is cut off.

The bits are a hash of a key and the element's index (murmur3's finalizer, twice), not drawn from a generator: they need
no memory and no saved state, and the kernel, plain torch and a rank with a shard of the rows all get the same ones.
Limits: elements 2³² apart share their bits; float32 beyond the largest bf16 may become infinite.
"""

from zlib import crc32

import torch
from torch import Tensor

from tightfit.kernels.triton_support import tl, triton

LOW = 0xFFFFFFFF
FIRST, SECOND = 0x85EBCA6B, 0xC2B2AE35


def key_of(seed: int, name: str, step: int) -> int:
    """A 32-bit key of a parameter and step, always the same."""
    return crc32(f"{seed}/{name}/{step}".encode())


def rounded(x: Tensor, key: int, first: int = 0) -> Tensor:
    """`x` (float32) on the grid of bf16, still as float32; `first` is the index of its first element."""
    index = torch.arange(first, first + x.numel(), device=x.device) & LOW
    noise = (_mixed(_mixed(index) ^ key) & 0xFFFF).to(torch.int32)
    bits = x.contiguous().view(torch.int32) + noise.view(x.shape)
    return (bits & -0x10000).view(torch.float32)


def _mixed(x: Tensor) -> Tensor:
    """murmur3's finalizer on 32 bits, held in 64."""
    x = ((x ^ (x >> 16)) * FIRST) & LOW
    x = ((x ^ (x >> 13)) * SECOND) & LOW
    return x ^ (x >> 16)


@triton.jit
def _mixed_bits(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def stochastic(x, index, key):  # type: ignore[no-untyped-def]
    """`rounded` inside a kernel: float32 `x` of elements `index` (int64), `key` an int32."""
    noise = _mixed_bits(_mixed_bits(index.to(tl.uint32)) ^ key.to(tl.uint32)) & 0xFFFF
    return ((x.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000).to(tl.float32, bitcast=True)
