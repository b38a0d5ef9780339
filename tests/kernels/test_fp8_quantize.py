"""Codes of 8-bit floats: the plain path against its definition, the kernels in the interpreter on exact numbers."""

import pytest
import torch
from torch import Tensor

from tests.covering import sampled
from tests.kernels.truth import DEVICE
from tightfit.kernels.fp8.fp8_matmul import fp8_matmul
from tightfit.kernels.fp8.fp8_quantize import LARGEST, quantize, quantize_columns, quantize_rows

SHAPES = [(1, 16), (37, 75), (130, 70), (16, 300)]
DTYPES = list(LARGEST)


def exact(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Numbers that the format has, its largest among those of every row and column: nothing is rounded.

    Triton's interpreter rounds up to a power of two wrongly; the GPU tests have numbers between codes.
    """
    torch.manual_seed(0)
    x = torch.randint(-4, 5, shape).float() * 2.0 ** torch.randint(-3, 4, shape)
    x[:, 0] = x[0] = LARGEST[dtype]
    return x.to(DEVICE)


@sampled(3)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_exact_numbers_keep_their_values(shape: tuple[int, int], dtype: torch.dtype, impl: str) -> None:
    x = exact(shape, dtype)
    plain, turned, scale = quantize(x, dtype, impl=impl)  # type: ignore[arg-type]
    assert scale == 1
    assert torch.equal(plain.float(), x)
    assert turned.shape == (shape[1], -(-shape[0] // 16) * 16)
    assert torch.equal(turned[:, : shape[0]].float(), x.t())
    assert not turned[:, shape[0] :].float().any()
    only = quantize(x, dtype, plain=False, amax=scale * LARGEST[dtype], impl=impl)  # type: ignore[arg-type]
    assert only[0].numel() == 0
    assert torch.equal(only[1].float(), turned.float())


@sampled(3)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_rows_and_columns_have_scales_of_their_own(shape: tuple[int, int], impl: str) -> None:
    x = exact(shape, torch.float8_e4m3fn)
    by_row = x * 2.0 ** torch.arange(shape[0], device=DEVICE).remainder(9)[:, None]
    codes, scales = quantize_rows(by_row, impl=impl)  # type: ignore[arg-type]
    assert torch.equal(scales[:, 0].log2(), torch.arange(shape[0], device=DEVICE).remainder(9).float())
    assert torch.equal(codes.float() * scales, by_row)
    by_column = x * 2.0 ** torch.arange(shape[1], device=DEVICE).remainder(7)
    codes, scales = quantize_columns(by_column, impl=impl)  # type: ignore[arg-type]
    assert torch.equal((codes.float() * scales)[:, : shape[0]], by_column.t())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_is_to_the_nearest_code(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64, device=DEVICE) * torch.exp(torch.randn(64, 64, device=DEVICE))
    plain, _, scale = quantize(x, dtype, impl="torch")
    bits = 3 if dtype == torch.float8_e4m3fn else 2
    smallest = scale * 2.0 ** (-6 if bits == 3 else -14)
    error = (plain.float() * scale - x).abs()
    assert (error <= 2.0 ** -(bits + 1) * x.abs().clamp(min=smallest) * 1.0001).all()
    assert plain.float().abs().max() == LARGEST[dtype]


def test_zeros_stay_zeros() -> None:
    for impl in ("torch", "triton"):
        codes, turned, scale = quantize(torch.zeros(3, 16, device=DEVICE), impl=impl)
        assert not codes.float().any()
        assert not turned.float().any()
        assert 0 < scale < 1e-30


def test_products_multiply_both_scales_in() -> None:
    a, b = torch.randn(5, 32, device="cpu"), torch.randn(16, 32, device="cpu")
    (a_codes, a_scale), (b_codes, b_scale) = quantize_rows(a), quantize_rows(b)
    found = fp8_matmul(a_codes, b_codes, a_scale, b_scale, torch.float32)
    truth = (a_codes.double() * a_scale) @ (b_codes.double() * b_scale).t()
    assert torch.allclose(found.double(), truth, rtol=1e-5, atol=1e-6)
    assert (found - a @ b.t()).norm() < 0.06 * (a @ b.t()).norm()
