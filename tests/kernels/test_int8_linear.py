"""Products of 8-bit integers against both factors expanded; on a GPU they are cuBLASLt's."""

import pytest
import torch

from tests.kernels.truth import DEVICE, error
from tightfit.errors import UserError
from tightfit.kernels.int8_linear import int8_linear, int8_linear_eager, rounded_rows


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 48), (20, 136, 24), (3, 33, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_against_expanding(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(2, rows, inputs, generator=generator).to(DEVICE, dtype)
    codes = torch.randint(-128, 128, (outputs, inputs), generator=generator).to(DEVICE, torch.int8)
    scale = (torch.rand(outputs, 1, generator=generator) + 0.1).to(DEVICE)
    made, eager = int8_linear(x, codes, scale), int8_linear_eager(x, codes, scale)
    assert made.shape == (2, rows, outputs)
    assert made.dtype == dtype
    assert error(made, eager) < (1e-6 if dtype == torch.float32 else 1e-3)
    assert error(made, x.double() @ (codes.double() * scale.double()).T) < 0.02  # what rounding x costs


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 48), (20, 136, 24), (3, 33, 5)])
def test_by_a_known_scale(rows: int, inputs: int, outputs: int) -> None:
    """In float64: every input to the nearest multiple of the scale, from −128 to 127 of them."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(2, rows, inputs, generator=generator).to(DEVICE)
    codes = torch.randint(-128, 128, (outputs, inputs), generator=generator).to(DEVICE, torch.int8)
    scale, known = (torch.rand(outputs, 1, generator=generator) + 0.1).to(DEVICE), torch.tensor([0.015], device=DEVICE)
    inside = (x / known).round().clamp(-128, 127).double() * known.double()
    assert error(int8_linear(x, codes, scale, known), inside @ (codes.double() * scale.double()).T) < 1e-6
    assert error(int8_linear_eager(x, codes, scale, known), inside @ (codes.double() * scale.double()).T) < 1e-6


def test_rows_are_rounded_to_the_nearest() -> None:
    codes, scale = rounded_rows(torch.tensor([[1.0, -0.5, 0.0], [0.0, 0.0, 0.0]]))
    assert codes.tolist() == [[127, -64, 0], [0, 0, 0]]
    assert scale[0].item() == pytest.approx(1 / 127)


def test_what_does_not_belong_together() -> None:
    with pytest.raises(UserError, match="int8 codes"):
        int8_linear(torch.ones(1, 8), torch.ones(4, 8), torch.ones(4, 1))
