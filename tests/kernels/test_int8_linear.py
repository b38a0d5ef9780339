"""Products of 8-bit integers against both factors expanded: by our kernels, and by torch's."""

from typing import Any

import pytest
import torch

from tests.covering import sampled
from tests.kernels.truth import DEVICE, error
from tightfit.errors import UserError
from tightfit.kernels.int8_linear import int8_linear, int8_linear_eager, rounded_rows
from tightfit.kernels.int8_matmul import round_rows
from tightfit.kernels.triton_support import Impl

IMPLS: list[Impl] = ["triton", "torch"]
SHAPES = [(1, 64, 48), (20, 136, 24), (3, 33, 5), (70, 64, 40)]


@sampled(3)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_against_expanding(rows: int, inputs: int, outputs: int, dtype: torch.dtype, impl: Impl) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(2, rows, inputs, generator=generator).to(DEVICE, dtype)
    codes = torch.randint(-128, 128, (outputs, inputs), generator=generator).to(DEVICE, torch.int8)
    scale = (torch.rand(outputs, 1, generator=generator) + 0.1).to(DEVICE)
    made, eager = int8_linear(x, codes, scale, impl=impl), int8_linear_eager(x, codes, scale)
    assert made.shape == (2, rows, outputs)
    assert made.dtype == dtype
    assert error(made, eager) < (1e-6 if dtype == torch.float32 else 1e-3)
    assert error(made, x.double() @ (codes.double() * scale.double()).T) < 0.02  # what rounding x costs


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_by_a_known_scale(rows: int, inputs: int, outputs: int, impl: Impl) -> None:
    """In float64: every input to the nearest multiple of the scale, from −128 to 127 of them."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(2, rows, inputs, generator=generator).to(DEVICE)
    codes = torch.randint(-128, 128, (outputs, inputs), generator=generator).to(DEVICE, torch.int8)
    scale, known = (torch.rand(outputs, 1, generator=generator) + 0.1).to(DEVICE), torch.tensor([0.015], device=DEVICE)
    inside = (x / known).round().clamp(-128, 127).double() * known.double()
    assert error(int8_linear(x, codes, scale, known, impl=impl), inside @ (codes.double() * scale.double()).T) < 1e-6
    assert error(int8_linear_eager(x, codes, scale, known), inside @ (codes.double() * scale.double()).T) < 1e-6


@pytest.mark.parametrize("rounding", [rounded_rows, round_rows])
def test_rows_are_rounded_to_the_nearest(rounding: Any) -> None:
    codes, scale = rounding(torch.tensor([[1.0, -0.5, 0.0], [0.0, 0.0, 0.0]], device=DEVICE))
    assert codes.tolist() == [[127, -64, 0], [0, 0, 0]]
    assert scale[0].item() == pytest.approx(1 / 127)


@pytest.mark.parametrize("known", [None, 0.02], ids=["by rows", "known"])
def test_both_round_to_the_same_codes(known: float | None) -> None:
    x = torch.randn(9, 200, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x[3] = torch.arange(200) / 2 - 50  # halves, to even
    scale = None if known is None else torch.tensor([known], device=DEVICE)
    for mine, torchs in zip(round_rows(x, scale), rounded_rows(x, scale), strict=True):
        assert torch.equal(mine, torchs)


@pytest.mark.parametrize("impl", IMPLS)
def test_what_is_no_number_stays_none_in_its_row_alone(impl: Impl) -> None:
    x = torch.ones(3, 64, device=DEVICE)
    x[1, 5] = float("nan")
    codes, scale = torch.ones(8, 64, dtype=torch.int8, device=DEVICE), torch.ones(8, 1, device=DEVICE)
    made = int8_linear(x, codes, scale, impl=impl)
    assert made[1].isnan().all()
    assert made[[0, 2]].allclose(torch.tensor(64.0, device=DEVICE))


def test_what_does_not_belong_together() -> None:
    with pytest.raises(UserError, match="int8 codes"):
        int8_linear(torch.ones(1, 8), torch.ones(4, 8), torch.ones(4, 1))
