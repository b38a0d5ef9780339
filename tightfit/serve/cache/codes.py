"""Keys and values in a byte each: int8, or fp8 (e4m3), with a float32 scale per vector of one token and head.

    int8   x ≈ scale · code,   scale = max|x| / 127     |error| ≤ max|x| / 254
    fp8    x ≈ scale · code,   scale = max|x| / 448     |error| ≤ max(|x| / 16, max|x| / 448 / 1024)

The error of attention follows: scores are off by at most ε = (softmax scale) · Σ|q| · (largest error of a key), so a
weight is off by a factor within e^±2ε, so an output is off by at most (e^2ε − 1) · max|v| + (largest error of a value).
Vectors have scales of their own, so nothing has to be calibrated and what is stored depends on the token alone.
"""

import torch
from torch import Tensor

from tightfit.memory.formulas.serving import CacheFormat

LARGEST: dict[CacheFormat, float] = {"int8": 127.0, "fp8": 448.0}
FP8 = torch.float8_e4m3fn
CODES: dict[CacheFormat, torch.dtype] = {"int8": torch.int8, "fp8": torch.uint8}
"""The dtype that codes are stored in; fp8 as bytes, which every device can copy and gather."""


def encode(x: Tensor, form: CacheFormat) -> tuple[Tensor, Tensor]:
    """Codes [..., D] and scales [...] of vectors x [..., D]."""
    wide = x.float()
    largest = wide.abs().amax(-1)
    scales = torch.where(largest > 0, largest / LARGEST[form], 1.0)
    scaled = wide / scales[..., None]
    if form == "int8":
        return scaled.round().clamp_(-127, 127).to(torch.int8), scales
    return scaled.clamp_(-448, 448).to(FP8).view(torch.uint8), scales


def decode(codes: Tensor, scales: Tensor, form: CacheFormat, dtype: torch.dtype) -> Tensor:
    """The vectors [..., D] that `codes` and `scales` stand for, as `dtype`."""
    wide = codes.float() if form == "int8" else codes.view(FP8).float()
    return (wide * scales[..., None]).to(dtype)


def as_numbers(codes: Tensor, form: CacheFormat) -> Tensor:
    """Stored codes as int8 or float8 numbers, which kernels read."""
    return codes if form == "int8" else codes.view(FP8)
