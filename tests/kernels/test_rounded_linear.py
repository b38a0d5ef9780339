"""Products of 8-bit codes, integers and floats, against both factors expanded: by our kernels, and by torch's."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.covering import sampled
from tests.kernels.truth import DEVICE, error
from tightfit.errors import UserError
from tightfit.kernels.mlp.glu import glu_eager
from tightfit.kernels.quantized.rounded_linear import rounded_linear, rounded_linear_eager, rounded_rows
from tightfit.kernels.quantized.rounded_matmul import RoundedTile, multiply_few, narrow_tile, round_rows
from tightfit.kernels.triton_support import Impl
from tightfit.models.spec import Activation

IMPLS: list[Impl] = ["triton", "torch"]
KINDS = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}
SHAPES = [(1, 64, 48), (20, 136, 24), (3, 33, 5), (150, 32, 40)]

both_kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def coded(outputs: int, inputs: int, kind: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Codes over the whole range of `kind`, and scales."""
    if kind == torch.int8:
        codes = torch.randint(-128, 128, (outputs, inputs), generator=generator).to(kind)
    else:
        codes = (100 * torch.randn(outputs, inputs, generator=generator)).clamp(-448, 448).to(kind)
    return codes.to(DEVICE), (torch.rand(outputs, 1, generator=generator) + 0.1).to(DEVICE)


def inputs_of(rows: int, width: int, kind: torch.dtype, generator: torch.Generator) -> Tensor:
    """[2, rows, width]; codes of 8-bit floats times a power of two are what they round to.

    Triton's interpreter rounds up to a power of two wrongly; tests/gpu has numbers between codes.
    """
    x = torch.randn(2, rows, width, generator=generator)
    if kind != torch.int8:
        x = (100 * x).clamp(-448, 448).to(kind).float() / 256
        x[..., 0] = 448 / 256
    return x.to(DEVICE)


@sampled(3)
@both_kinds
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_against_expanding(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype, impl: Impl, kind: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = inputs_of(rows, inputs, kind, generator).to(dtype) / 16
    codes, scale = coded(outputs, inputs, kind, generator)
    made, eager = rounded_linear(x, codes, scale, impl=impl), rounded_linear_eager(x, codes, scale)
    assert made.shape == (2, rows, outputs)
    assert made.dtype == dtype
    assert error(made, eager) < (1e-6 if dtype == torch.float32 else 1e-3)
    exact = x.double() @ (codes.double() * scale.double()).T
    assert error(made, exact) < (0.02 if kind == torch.int8 else 1e-3)  # what rounding x costs, and y


@both_kinds
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_by_a_known_scale(rows: int, inputs: int, outputs: int, impl: Impl, kind: torch.dtype) -> None:
    """In float64: every input to the nearest code times the scale, from the least to the largest code."""
    generator = torch.Generator().manual_seed(rows)
    x = inputs_of(rows, inputs, kind, generator)
    known = torch.tensor([0.015 if kind == torch.int8 else 1 / 128], device=DEVICE)
    codes, scale = coded(outputs, inputs, kind, generator)
    ratio = x / known
    inside = ratio.round().clamp(-128, 127) if kind == torch.int8 else ratio.clamp(-448, 448).to(kind)
    exact = (inside.double() * known.double()) @ (codes.double() * scale.double()).T
    assert error(rounded_linear(x, codes, scale, known, impl=impl), exact) < 1e-6
    assert error(rounded_linear_eager(x, codes, scale, known), exact) < 1e-6


@pytest.mark.parametrize("rounding", [rounded_rows, round_rows])
def test_rows_are_rounded_to_the_nearest(rounding: Any) -> None:
    codes, scale = rounding(torch.tensor([[1.0, -0.5, 0.0], [0.0, 0.0, 0.0]], device=DEVICE), torch.int8)
    assert codes.tolist() == [[127, -64, 0], [0, 0, 0]]
    assert scale[0].item() == pytest.approx(1 / 127)


@pytest.mark.parametrize("known", [None, 1 / 64], ids=["by rows", "known"])
@both_kinds
def test_both_round_to_the_same_codes(known: float | None, kind: torch.dtype) -> None:
    x = inputs_of(9, 200, kind, torch.Generator().manual_seed(0))[0]
    if kind == torch.int8:
        x[3] = torch.arange(200) / 2 - 50  # halves, to even
    scale = None if known is None else torch.tensor([known], device=DEVICE)
    for mine, torchs in zip(round_rows(x, kind, scale), rounded_rows(x, kind, scale), strict=True):
        assert torch.equal(mine.float(), torchs.float())


@both_kinds
@pytest.mark.parametrize("impl", IMPLS)
def test_what_is_no_number_stays_none_in_its_row_alone(impl: Impl, kind: torch.dtype) -> None:
    x = torch.ones(3, 64, device=DEVICE)
    x[1, 5] = float("nan")
    codes, scale = torch.ones(8, 64, device=DEVICE).to(kind), torch.ones(8, 1, device=DEVICE)
    made = rounded_linear(x, codes, scale, impl=impl)
    assert made[1].isnan().all()
    assert made[[0, 2]].allclose(torch.tensor(64.0, device=DEVICE))


@both_kinds
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("activation", ["silu", "swiglu_clamped"])
def test_gated_inputs(activation: Activation, impl: Impl, kind: torch.dtype) -> None:
    """Rounded after the activation: the same number everywhere, so that every input is the largest of its row."""
    both = torch.cat([torch.full((5, 64), 2.0), torch.full((5, 64), 1.5)], 1).to(DEVICE)
    codes, scale = coded(24, 64, kind, torch.Generator().manual_seed(0))
    gate, up = both.double().chunk(2, dim=1)
    gated = glu_eager(gate, up, activation)
    found = rounded_linear(both, codes, scale, None, activation, impl=impl)
    assert error(found, gated @ (codes.double() * scale.double()).T) < 1e-6
    with pytest.raises(UserError, match=r"\[5, 128\]"):
        rounded_linear(both, codes, scale)


@pytest.mark.parametrize("room", [99 * 2**10, 163 * 2**10, 227 * 2**10], ids=["GeForce", "A100", "H100"])
def test_blocks_that_are_loaded_ahead_have_room(room: int) -> None:
    """In the shared memory that a program of the card can have; the compiler keeps some for itself."""
    for rows, outputs in product((1, 16, 40, 64, 128, 256), (1024, 4096, 28672)):
        tile = narrow_tile(rows, outputs, room)
        assert tile.stages >= 2
        assert tile.stages * (tile.block_m + tile.block_n) * tile.block_k <= room - 2048


@both_kinds
def test_a_row_has_the_same_bits_whoever_else_is_there(kind: torch.dtype) -> None:
    """In tiles of one size: other sizes may add the products of a row in another order."""
    codes, scale = coded(40, 96, kind, torch.Generator().manual_seed(0))
    q, row_scale = round_rows(torch.randn(40, 96).to(DEVICE), kind)
    tile = RoundedTile(block_m=64, block_n=64, block_k=32, stages=2)
    every = multiply_few(q, codes, row_scale, scale, torch.float32, tile)
    for rows in (1, 17, 33):
        few = multiply_few(q[:rows], codes, row_scale[:rows], scale, torch.float32, tile)
        assert torch.equal(few, every[:rows])


def test_what_does_not_belong_together() -> None:
    with pytest.raises(UserError, match="int8 or e4m3 codes"):
        rounded_linear(torch.ones(1, 8), torch.ones(4, 8), torch.ones(4, 1))
