"""MXFP4 weights, in which gpt-oss is published: dequantized on reading to bf16, which holds all of them exactly.

A matrix [rows, columns] is stored as two tensors: `_blocks` [rows, columns / 32, 16], bytes of two 4-bit codes each,
the lower four bits first, and `_scales` [rows, columns / 32], whose byte b means 2^(b − 127) for its 32 numbers (Open
Compute Project, Microscaling Formats 1.0). A code is a sign and one of 0, ½, 1, 1½, 2, 3, 4, 6 (E2M1). Experts come
before rows.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
BIAS, HALF_BLOCK = 127, 16
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def packed_names(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The names that packed weights would have unpacked, with those of their blocks and scales."""
    known = set(names)
    stems = [name.removesuffix(BLOCKS) for name in known if name.endswith(BLOCKS)]
    return {stem: (stem + BLOCKS, stem + SCALES) for stem in stems if stem + SCALES in known}


def unpacked_shape(blocks: Iterable[int]) -> tuple[int, ...]:
    """The shape of `unpacked` for blocks of this shape: columns before rows, as transformers has them unpacked."""
    *experts, rows, groups, half = blocks
    return (*experts, groups * 2 * half, rows)


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """The weights in bf16, [experts, columns, rows]."""
    values = torch.tensor((*VALUES, *(-value for value in VALUES)), dtype=torch.bfloat16)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # [..., groups, 32]
    exponents = scales.to(torch.int32)[..., None] - BIAS
    return torch.ldexp(values[codes.int()], exponents).to(torch.bfloat16).flatten(-2).mT
