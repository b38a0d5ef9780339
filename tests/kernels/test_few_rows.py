"""Products of a few tokens with what may stand after them, against eager."""

import pytest
import torch

from tests.covering import sampled
from tests.kernels.truth import DEVICE, DTYPES, HAS_GPU, assert_no_worse
from tightfit.kernels.decoding.few_rows import LEAST_OUTPUTS, MOST_ROWS, few_rows, few_rows_eager, takes_few_rows
from tightfit.kernels.overlap import can_overlap
from tightfit.kernels.triton_support import is_interpreted
from tightfit.models.spec import Activation

ACTIVATIONS: list[Activation | None] = [None, "silu", "gelu_tanh", "swiglu_clamped"]
SHAPES = [(2, 24, 32), (3, 37, 80), (20, 33, 200), (50, 70, 48)]
"""Tokens, outputs and inputs; of 80 and 200 the last block is not full."""

if not (is_interpreted() or can_overlap(DEVICE)):
    pytest.skip("needs Hopper's copies of blocks", allow_module_level=True)


def numbers(M: int, N: int, K: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and bias."""
    x, weight, bias = torch.randn(M, K) * 0.5, torch.randn(N, K) * 0.2, torch.randn(N)
    return x.to(DEVICE, dtype), weight.to(DEVICE, dtype), bias.to(DEVICE, dtype)


@sampled(3)
@pytest.mark.parametrize("dtype", DTYPES[1:] if HAS_GPU else DTYPES)  # of 16 bits on a GPU, as it is asked for there
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_what_eager_makes(activation: Activation | None, biased: bool, dtype: torch.dtype) -> None:
    for M, N, K in SHAPES:
        x, weight, bias = numbers(M, 2 * N if activation else N, K, dtype)
        own, exact = (bias, bias.double()) if biased else (None, None)
        found = few_rows(x, weight, own, activation or "")
        eager = few_rows_eager(x, weight, own, activation or "")
        truth = few_rows_eager(x.double(), weight.double(), exact, activation or "")
        assert_no_worse([found], [eager], [truth])


def test_a_row_has_the_same_bits_whoever_else_is_there() -> None:
    x, weight, bias = numbers(40, 48, 96, torch.float16)
    every = few_rows(x, weight, bias)
    for rows in (2, 17, 33):
        assert torch.equal(few_rows(x[:rows], weight, bias), every[:rows])


def test_registered_properly() -> None:
    x, weight, bias = numbers(3, 24, 32, torch.float32)
    torch.library.opcheck(torch.ops.tightfit.few_rows.default, (x, weight, bias, "silu", False))


def test_cuda_libraries_have_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU all of it, so this is asked as on a card of the kind."""
    x, weight, _ = numbers(MOST_ROWS, LEAST_OUTPUTS, 32, torch.float16)
    assert takes_few_rows(x, weight) == x.is_cuda
    monkeypatch.setattr("tightfit.kernels.decoding.few_rows.use_triton", lambda impl, x: True)
    monkeypatch.setattr("tightfit.kernels.decoding.few_rows.can_overlap", lambda device: True)
    assert takes_few_rows(x, weight)
    with monkeypatch.context() as smaller:
        smaller.setattr("tightfit.kernels.decoding.few_rows.has_room", lambda device: False)
        assert not takes_few_rows(x, weight)
    assert not takes_few_rows(x, weight[1:])
    assert not takes_few_rows(x[:1], weight)
    assert not takes_few_rows(torch.cat((x, x)), weight)
    assert not takes_few_rows(x.float(), weight.float())
    assert not takes_few_rows(x[:, :20].contiguous(), weight[:, :20].contiguous())
    assert not takes_few_rows(x, weight.T.contiguous().T)
