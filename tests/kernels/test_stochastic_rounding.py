"""Stochastic rounding: neighbours only, the right mean, bits that follow from key and position alone."""

import torch

from tests.kernels.truth import DEVICE
from tightfit.kernels.optimizer.stochastic_rounding import key_of, rounded, stochastic
from tightfit.kernels.triton_support import tl, triton


@triton.jit
def round_kernel(x_ptr, out_ptr, count, key, first, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK).to(tl.int64)
    x = tl.load(x_ptr + at, mask=at < count, other=0)
    tl.store(out_ptr + at, stochastic(x, at + first, key), mask=at < count)


def test_results_are_the_two_neighbours_in_bf16() -> None:
    x = torch.randn(5000)
    found = rounded(x, key_of(0, "w", 1))
    assert torch.equal(found, found.bfloat16().float())
    below = (x.view(torch.int32) & -0x10000).view(torch.float32)
    above = ((x.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
    assert ((found == below) | (found == above)).all()
    assert (found == above).float().mean() > 0.4
    exact = x.bfloat16().float()
    assert torch.equal(rounded(exact, 12345), exact)


def test_the_mean_is_the_number_itself() -> None:
    """5 standard errors of a fair coin between neighbours; rounding to nearest is 20 times as far off."""
    for value in (1.001, -1.001, 3.0e-5 * 1.0007, 0.3):
        x = torch.full((200_000,), value)
        below = float((x[:1].view(torch.int32) & -0x10000).view(torch.float32))
        gap = abs(float(((x[:1].view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)) - below)
        error = float(rounded(x, key_of(1, "w", 7)).double().mean()) - float(x[0].double())
        assert abs(error) < 5 * gap / 2 / 200_000**0.5


def test_steps_names_and_seeds_have_bits_of_their_own() -> None:
    x = torch.full((10_000,), 1.002)
    keys = [key_of(0, "a", 1), key_of(0, "a", 2), key_of(0, "b", 1), key_of(1, "a", 1)]
    results = [rounded(x, key) for key in keys]
    assert torch.equal(results[0], rounded(x, keys[0]))
    up = (results[0] > 1.002).float()
    for other in results[1:]:
        agree = torch.corrcoef(torch.stack([up, (other > 1.002).float()]))[0, 1]
        assert abs(float(agree)) < 0.05


def test_a_part_has_the_bits_it_has_in_the_whole() -> None:
    x = torch.randn(40, 25)
    whole = rounded(x, 99)
    assert torch.equal(rounded(x[16:], 99, first=16 * 25), whole[16:])


def test_kernel_makes_the_same_bits() -> None:
    x = torch.randn(3000, device=DEVICE)
    for key in (0, 7, 2**31 + 5, key_of(3, "w", 9)):
        out = torch.empty_like(x)
        signed = (key + 2**31) % 2**32 - 2**31
        round_kernel[(1,)](x, out, x.numel(), signed, 1000, BLOCK=4096)
        assert torch.equal(out, rounded(x, key, first=1000))
