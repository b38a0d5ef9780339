"""Products of some rows with 4-bit weights as the tensor cores' left factor, against expanding and multiplying."""

import pytest
import torch
from torch import Tensor

from tests.covering import sampled
from tests.kernels.truth import DEVICE, DTYPES, assert_no_worse
from tightfit.kernels.quantized.packed_blocks import (
    Blocks,
    Scaled,
    blocks_for,
    is_hopper,
    launch_blocks,
    packed_blocks,
    takes_blocks,
)
from tightfit.kernels.quantized.packed_rows import by_group
from tightfit.kernels.quantized.packing import pack_tiles
from tightfit.kernels.quantized.quantized_linear import quantized_linear_eager
from tightfit.kernels.triton_support import is_interpreted

if not is_hopper(DEVICE):
    pytest.skip("needs Hopper's tensor cores", allow_module_level=True)

SHAPES = [(17, 512, 48, 128), (33, 768, 80, 256), (5, 384, 16, 0), (64, 128, 160, 128)]
"""Rows, inputs, outputs, group: the last block of rows or outputs is not full, one tile of inputs or several."""
NARROW = [dtype for dtype in DTYPES if dtype.itemsize == 2]
ADDED = 1e-5
"""How far float32 is off where 128 was added to codes of 4 bits and taken off the product again."""


def weights(
    inputs: int, outputs: int, group: int, *, zeros: bool, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Words, scales of `dtype` and zero points."""
    generator = torch.Generator().manual_seed(inputs + outputs)
    groups = inputs // group if group else 1
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator)
    scale = (torch.rand(outputs, groups, generator=generator) + 0.5) / 16
    zero = by_group(torch.randint(0, 16, (outputs, groups), generator=generator).to(DEVICE, torch.uint8))
    return pack_tiles(codes, 4).to(DEVICE), by_group(scale.to(DEVICE, dtype)), zero if zeros else None


def rows_of(rows: int, inputs: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(DEVICE, dtype)


@sampled(6)
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("scaled", "zeros"), [("sums", True), ("sums", False), ("weights", True), ("weights", False)])
def test_it_is_what_expanding_gives(
    scaled: Scaled, zeros: bool, scales: torch.dtype, split: int, dtype: torch.dtype
) -> None:
    """With scales of either dtype applied in either place."""
    for M, K, N, group in SHAPES:
        words, scale, zero = weights(K, N, group, zeros=zeros, dtype=scales)
        x = rows_of(M, K, dtype)
        size = 32 if is_interpreted() else 128
        blocks = Blocks(block_m=16, block_n=size, split=min(split, K // 128), stages=3, warps=4, scaled=scaled)
        found = launch_blocks(x, words, scale, zero, group, blocks)
        eager = quantized_linear_eager(x, words, scale, zero, 4, group)
        truth = quantized_linear_eager(x.double(), words, scale, zero, 4, group)
        assert_no_worse([found], [eager], [truth], rounding=ADDED)


@sampled(2)
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("rows", [17, 64, 130])
def test_cut_by_the_rule(rows: int, dtype: torch.dtype) -> None:
    words, scale, zero = weights(512, 48, 128, zeros=True)
    x = rows_of(rows, 512, dtype)
    found = packed_blocks(x, words, scale, zero, 128, False)
    eager = quantized_linear_eager(x, words, scale, zero, 4, 128)
    truth = quantized_linear_eager(x.double(), words, scale, zero, 4, 128)
    assert_no_worse([found], [eager], [truth], rounding=ADDED)


def test_the_rule_keeps_processors_busy() -> None:
    """Two programs on most of an H200's 132 processors and no more, where outputs or inputs are many enough."""
    for rows in (17, 64, 128, 256):
        for outputs, inputs in ((14336, 4096), (4096, 14336)):
            blocks = blocks_for(rows, outputs, inputs, 132)
            programs = -(-outputs // blocks.block_n) * -(-rows // blocks.block_m) * blocks.split
            assert 0.8 * 264 < programs <= 264
    assert blocks_for(17, 48, 256, 132).split == 1
    assert blocks_for(17, 4096, 4096, 132).split == 8


def test_registered_properly() -> None:
    words, scale, zero = weights(256, 16, 128, zeros=True)
    x = rows_of(17, 256, NARROW[0])
    torch.library.opcheck(torch.ops.tightfit.packed_blocks.default, (x, words, scale, zero, 128, False))


def test_what_is_left_to_others() -> None:
    words, scale, zero = weights(512, 48, 128, zeros=True)
    x = rows_of(17, 512, torch.float16)
    assert zero is not None
    assert takes_blocks(x, words, scale, zero, 4, 128)
    assert takes_blocks(x, words, scale, None, 4, 128)
    assert not takes_blocks(x.float(), words, scale, zero, 4, 128)
    assert not takes_blocks(x, words, scale.contiguous(), zero, 4, 128)
    assert not takes_blocks(x, words, scale, zero.contiguous(), 4, 128)
    assert not takes_blocks(x, words, scale, zero, 8, 128)
    assert not takes_blocks(x, words, scale, zero, 4, 64)
    assert not takes_blocks(x, words[:40].contiguous(), scale[:40], zero[:40], 4, 128)
