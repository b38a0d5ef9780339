"""Products with packed weights: the kernels against expanding and multiplying, in every width, shape and group."""

from itertools import product

import pytest
import torch
from torch import Tensor

from tests.covering import covering, sampled
from tests.kernels.truth import DEVICE, DTYPES, assert_no_worse
from tightfit.errors import UserError
from tightfit.kernels.quantized.packing import pack, pack_tiles
from tightfit.kernels.quantized.quantized_linear import expanded_eager, quantized_linear, quantized_linear_eager
from tightfit.kernels.triton_support import Impl
from tightfit.models.spec import Activation

SHAPES = [(1, 256, 48), (5, 512, 33), (2, 1024, 10), (17, 256, 16), (257, 256, 16)]
"""Rows, inputs, outputs: read packed, and the last expanded first."""
ADDED = 1024 * 2.0**-24
"""How much float32 rounds a sum of float16 codes by: 1024 is added to each, and taken off the sum again. It shows where
eager's weights are exact, as those of 2 bits are: all that eager rounds then is the result."""


def weights(inputs: int, outputs: int, bits: int, group: int, zeros: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(inputs + outputs + bits)
    codes = torch.randint(0, 2**bits, (outputs, inputs), generator=generator)
    groups = 1 if group == 0 else inputs // group
    scale = (torch.rand(outputs, groups, generator=generator) + 0.5) * 2.0**-bits
    zero = torch.randint(0, 2**bits, (outputs, groups), generator=generator).to(torch.uint8) if zeros else None
    moved = None if zero is None else zero.to(DEVICE)
    return pack_tiles(codes, bits).to(DEVICE), scale.to(DEVICE, torch.float16), moved


WAYS = list(product((2, 4, 8), ((32, True), (64, False), (0, True)), DTYPES))


@sampled(5)
@pytest.mark.parametrize(("bits", "grouping", "dtype"), covering(WAYS, pairs=True), ids=str)
def test_against_expanding(bits: int, grouping: tuple[int, bool], dtype: torch.dtype) -> None:
    group, zeros = grouping
    for rows, inputs, outputs in SHAPES:
        given = weights(inputs, outputs, bits, group, zeros)
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(DEVICE, dtype)
        truth = quantized_linear_eager(x.double(), *given, bits, group)
        eager = quantized_linear_eager(x, *given, bits, group)
        assert_no_worse([quantized_linear(x, *given, bits, group, impl="triton")], [eager], [truth], rounding=ADDED)


@sampled(3)
@pytest.mark.parametrize("rows", [1, 9, 20, 257])
@pytest.mark.parametrize("zeros", [True, False])
def test_what_stands_after_the_product(rows: int, zeros: bool) -> None:
    """A gated activation, gate over up, and the residual: the same in one kernel as after one another."""
    cases: list[tuple[Activation | None, int]] = [("silu", 40), (None, 24)]
    for activation, outputs in cases:
        given = weights(256, outputs, 4, 64, zeros)
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, 256, generator=generator).to(DEVICE, torch.float16)
        residual = torch.randn(rows, outputs // (2 if activation else 1), generator=generator).to(DEVICE, x.dtype)

        def run(x: Tensor, residual: Tensor, impl: Impl) -> Tensor:
            return quantized_linear(x, *given, 4, 64, activation=activation, residual=residual, impl=impl)  # noqa: B023

        truth, eager = run(x.double(), residual.double(), "torch"), run(x, residual, "torch")
        assert_no_worse([run(x, residual, "triton")], [eager], [truth])


def test_by_hand() -> None:
    """Codes 0 … 7 with zero point 2 and scale ½: (−2, −1, 0, 1, 2, 3, 4, 5) / 2, summed by ones: 6."""
    words = pack(torch.arange(8)[None], 4)
    zero, scale = torch.tensor([[2]], dtype=torch.uint8), torch.tensor([[0.5]])
    assert expanded_eager(words, scale, zero, 4, 8, torch.float32).tolist() == [[-1.0, -0.5, 0, 0.5, 1, 1.5, 2, 2.5]]
    assert quantized_linear(torch.ones(1, 8), words, scale, zero, 4, 0, impl="torch").item() == 6.0


def test_widths_without_kernel_take_the_plain_path() -> None:
    words, scale = pack(torch.arange(8).repeat(2, 4), 3), torch.ones(2, 1)
    x = torch.ones(1, 32, device="cpu")
    assert quantized_linear(x, words, scale, None, 3, 0).tolist() == [[-16.0, -16.0]]


def test_what_does_not_belong_together() -> None:
    words, scale, zero = weights(128, 32, 4, 32, True)
    with pytest.raises(UserError, match="do not belong together"):
        quantized_linear(torch.ones(1, 256, device=DEVICE), words, scale, zero, 4, 32, impl="triton")
