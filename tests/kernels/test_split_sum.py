"""Sums in 24 bits against float64: as near as float32 once rounded to bf16, and rounded as torch rounds."""

import pytest
import torch

from tests.kernels.truth import DEVICE, error
from tightfit.kernels.loss.split_sum import SplitSum
from tightfit.levers.policy import loss_chunks


def summed(products: list[torch.Tensor]) -> SplitSum:
    """All of them added up, in two blocks of rows each."""
    total = SplitSum(products[0])
    for product in products:
        total.add(0, product[:3])
        total.add(3, product[3:])
        total.is_empty = False
    return total


def test_sums_are_as_near_as_float32_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    products = [torch.randn(7, 1000, generator=generator).to(DEVICE) for _ in range(8)]
    truth = torch.stack(products).double().sum(0)
    one = torch.ones(1, device=DEVICE)
    found = summed(products).rounded(one, in_place=False)
    wide = torch.stack(products).sum(0).bfloat16()
    in_bf16 = products[0].bfloat16()
    for product in products[1:]:
        in_bf16 = (in_bf16.float() + product).bfloat16()
    assert found.dtype == torch.bfloat16
    assert error(found, truth) < 1.01 * error(wide, truth)
    assert error(in_bf16, truth) > 1.5 * error(wide, truth)


def test_one_product_is_rounded_as_torch_rounds() -> None:
    values = torch.tensor([[1.0, -1.0, 1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 3e38, 1e-30, 0.0]], device=DEVICE)
    values = torch.cat([values] * 7)
    total = summed([values])
    half = torch.full((1,), 0.5, device=DEVICE)
    assert torch.equal(total.rounded(half, in_place=False), (values * 0.5).bfloat16())
    made = total.rounded(half, in_place=True)
    assert torch.equal(made, (values * 0.5).bfloat16())
    assert made.data_ptr() == total.high.data_ptr()


def test_what_is_not_finite_stays_so() -> None:
    values = torch.tensor([[float("inf"), -float("inf"), float("nan")]] * 7, device=DEVICE)
    found = summed([values, torch.ones_like(values)]).rounded(torch.ones(1, device=DEVICE), in_place=True)
    assert not bool(found.float().isfinite().any())
    full = torch.full((7, 3), -1, dtype=torch.int32, device=DEVICE).bitwise_right_shift(1).bitwise_and(0x7FFFFFFF)
    found = summed([full.view(torch.float32)]).rounded(torch.ones(1, device=DEVICE), in_place=True)
    assert bool(found.float().isnan().all()), "a GPU's NaN has all bits of its mantissa"


def test_the_result_is_as_near_as_the_exact_sum_rounded() -> None:
    """Also where exponents differ by element and by product, and where what was added is taken away again."""
    generator = torch.Generator().manual_seed(1)
    one = torch.ones(1, device=DEVICE)
    for exponents in ((0, 0), (-20, 20), (-140, -120)):
        scales = torch.randint(exponents[0], exponents[1] + 1, (8, 7, 1000), generator=generator).double().exp2()
        products = [x.float().to(DEVICE) for x in torch.randn(8, 7, 1000, generator=generator).double() * scales]
        products.append(-0.9 * products[0])
        truth = torch.stack(products).double().sum(0)
        found = summed(products).rounded(one, in_place=False)
        near = (found.double() - truth).abs() <= 1.05 * (truth.bfloat16().double() - truth).abs() + 2**-14 * sum(
            x.double().abs() for x in products
        ) + 2.0**-140
        assert bool(near.all())
        assert error(found, truth) <= 1.05 * error(truth.bfloat16(), truth) + 1e-30


def test_products_are_added_in_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a transposed view, in memory that held other numbers, the last block smaller than the others."""
    monkeypatch.setattr(loss_chunks, "TILE_ROWS", 16)
    monkeypatch.setattr(loss_chunks, "SPLIT_PRODUCT_BYTES", 16 * 24 * 4)
    generator = torch.Generator().manual_seed(2)
    left, right = (torch.randn(3, 40, n, generator=generator).to(DEVICE) for n in (53, 24))
    total = SplitSum(torch.empty(53, 24, device=DEVICE))
    scratch = torch.full((16 * 24,), float("nan"), device=DEVICE)
    for a, b in zip(left, right, strict=True):
        total.add_product(a.T, b, scratch)
    truth = sum(a.double().T @ b.double() for a, b in zip(left, right, strict=True))
    assert isinstance(truth, torch.Tensor)
    found = total.rounded(torch.ones(1, device=DEVICE), in_place=True)
    assert error(found, truth) <= 1.05 * error(truth.bfloat16(), truth)
