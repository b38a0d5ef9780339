"""The 8-bit map: its values against their definition, its rounding against a search through all of them."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests.kernels.truth import DEVICE
from tightfit.kernels.optimizer.dynamic_map import SIGNED, UNSIGNED, decode, decoded, encode, encoded, table
from tightfit.kernels.triton_support import tl, triton

BOTH = pytest.mark.parametrize("decades", [SIGNED, UNSIGNED])


@triton.jit
def there_and_back(x_ptr, code_ptr, value_ptr, count, DECADES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    codes = encoded(tl.load(x_ptr + at, mask=at < count, other=0), DECADES)
    tl.store(code_ptr + at, codes, mask=at < count)
    tl.store(value_ptr + at, decoded(codes, DECADES), mask=at < count)


@BOTH
def test_codes_fill_the_bits_and_reach_from_a_millionth_to_one(decades: int) -> None:
    values = table(decades)
    assert len(values) == 2**decades
    assert (values.diff() > 0).all()
    assert values[0] == 0
    assert values[-1] == 1
    assert values[1].item() == pytest.approx(10.0 ** (1 - decades))
    top = values[2 ** (decades - 1) :]
    assert torch.allclose(top.diff(), torch.tensor(0.9 / 2 ** (decades - 1)), rtol=1e-3)


@BOTH
def test_every_code_is_its_own_nearest(decades: int) -> None:
    codes = torch.arange(2**decades)
    assert torch.equal(encode(decode(codes, decades), decades), codes)


@BOTH
def test_rounding_is_to_the_nearest_value(decades: int) -> None:
    x = torch.cat([torch.rand(500), 10 ** (-9 * torch.rand(500)), torch.tensor([0.0, 1.0, 0.1, 1e-9])])
    nearest = (x[:, None].double() - table(decades).double()).abs().min(1).values
    found = (decode(encode(x, decades), decades).double() - x.double()).abs()
    assert torch.allclose(found, nearest, rtol=1e-5, atol=1e-12)


@BOTH
def test_kernel_makes_the_same_codes_and_values(decades: int) -> None:
    x = torch.cat([torch.rand(500), 10 ** (-9 * torch.rand(500)), torch.tensor([0.0, 1.0, 0.1]), table(decades)])
    x = x.to(DEVICE)
    codes, values = torch.empty_like(x, dtype=torch.int32), torch.empty_like(x)
    there_and_back[(1,)](x, codes, values, x.numel(), DECADES=decades, BLOCK=2048)
    wanted = encode(x, decades)
    assert (codes != wanted).float().mean() < 0.005  # ties, which a last bit decides
    assert (codes - wanted).abs().max() <= 1
    assert torch.allclose(values, decode(codes, decades), rtol=1e-5)
    assert torch.equal(codes[-(2**decades) :].cpu(), torch.arange(2**decades, dtype=torch.int32))


@BOTH
def test_nothing_of_a_rehearsal_is_kept_for_a_real_step_nor_the_other_way_round(decades: int) -> None:
    x = torch.rand(50)
    wanted = encode(x, decades)
    for _ in range(2):
        with FakeTensorMode():
            fake = decode(encode(torch.empty(50), decades), decades)
        assert isinstance(fake, FakeTensor)
        assert fake.shape == x.shape
        assert torch.equal(encode(x, decades), wanted)
        assert type(decode(wanted, decades)) is torch.Tensor


def test_a_rehearsal_may_be_the_first_to_ask() -> None:
    decades = 5  # of which nobody has asked before
    with FakeTensorMode():
        encode(torch.empty(3), decades)
    codes = torch.arange(2**decades)
    assert torch.equal(encode(decode(codes, decades), decades), codes)
