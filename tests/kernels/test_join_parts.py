"""Rows summed and joined in one pass: the kernel against torch in float64, whatever the layout and the dtypes."""

import pytest
import torch
from torch import Tensor

from tests.covering import sampled
from tests.kernels.truth import DEVICE
from tightfit.kernels.attention.join_parts import add_rows, join_

B, HEADS, T, D = 2, 3, 37, 24
DTYPES = [
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
]


def rows(dtype: torch.dtype, seed: int, *, by_token: bool) -> Tensor:
    """[B, HEADS, T, D] of the last rows of a longer tensor; `by_token`, heads of a token lie together."""
    generator = torch.Generator().manual_seed(seed)
    shape = (B, T + 5, HEADS, D) if by_token else (B, HEADS, T + 5, D)
    made = torch.randn(shape, generator=generator).to(DEVICE, dtype)
    return (made.transpose(1, 2) if by_token else made)[:, :, 5:]


def rounded_once(found: Tensor, wanted: Tensor) -> bool:
    """Whether `found` is the float64 truth to a unit in its last place (Triton's interpreter cuts off), beside
    float32's own error."""
    bound = {torch.bfloat16: 2**-7, torch.float32: 1e-6}[found.dtype]
    return bool(((found.double() - wanted).abs() <= bound * wanted.abs() + 2e-6).all())


@pytest.mark.parametrize(("dtype", "into_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_sums_are_rounded_once(impl: str, dtype: torch.dtype, into_dtype: torch.dtype) -> None:
    first, second = rows(dtype, 0, by_token=True), rows(torch.bfloat16, 1, by_token=False)
    into = torch.empty_like(first, dtype=into_dtype)
    add_rows(first, second, into, impl=impl)  # type: ignore[arg-type]
    assert rounded_once(into, first.double() + second.double())


@sampled(3)
@pytest.mark.parametrize(("dtype", "into_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_parts_are_joined_by_their_logsumexp(impl: str, dtype: torch.dtype, into_dtype: torch.dtype) -> None:
    """Rows far apart too, where one part counts for nothing."""
    out, more = rows(dtype, 0, by_token=True), rows(torch.bfloat16, 1, by_token=False)
    logs, more_logs = (rows(torch.float32, seed, by_token=False)[..., 0] * 30 for seed in (2, 3))
    logs, more_logs = logs.contiguous(), more_logs - 1e30 * (torch.arange(T, device=DEVICE) == 7)
    shares = torch.stack([logs, more_logs]).double().softmax(0)[..., None]
    wanted, wanted_logs = out.double() * shares[0] + more.double() * shares[1], logs.double().logaddexp(more_logs)
    into = torch.empty_like(out, dtype=into_dtype)
    join_(out, logs, more, more_logs, into, impl=impl)  # type: ignore[arg-type]
    assert rounded_once(into, wanted)
    assert torch.allclose(logs.double(), wanted_logs.double(), atol=1e-5)


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_the_result_may_be_an_operand(impl: str) -> None:
    out, more = rows(torch.float32, 0, by_token=True), rows(torch.float32, 1, by_token=True)
    wanted = out + more
    add_rows(out, more, out, impl=impl)  # type: ignore[arg-type]
    assert torch.equal(out, wanted)
