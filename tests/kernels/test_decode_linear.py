"""Small products with all that may stand before and after them, against eager."""

from typing import Any

import pytest
import torch

from tests.kernels.truth import DEVICE, DTYPES, assert_no_worse
from tightfit.kernels.decoding.decode_linear import decode_linear, decode_linear_eager

CASES: list[dict[str, Any]] = [
    {},
    {"bias": True},
    {"norm": True, "norm_eps": 1e-5},
    {"norm": True, "norm_eps": 1e-6, "norm_offset": 1.0, "bias": True, "residual": True},
    {"activation": "silu", "norm": True, "norm_eps": 1e-5},
    {"activation": "gelu_tanh", "bias": True},
    {"residual": True},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_it_is_what_eager_makes(case: dict[str, Any], dtype: torch.dtype) -> None:
    M, N, K = 1, 37, 80
    width = 2 * N if "activation" in case else N
    given = {
        "bias": torch.randn(width) if case.get("bias") else None,
        "norm": torch.rand(K) + 0.5 if case.get("norm") else None,
        "residual": torch.randn(M, N) if case.get("residual") else None,
    }
    tensors: Any = {name: None if t is None else t.to(DEVICE, dtype) for name, t in given.items()}
    rest = {name: value for name, value in case.items() if name not in given}
    x, weight = (torch.randn(M, K) * 0.5).to(DEVICE, dtype), (torch.randn(width, K) * 0.2).to(DEVICE, dtype)
    found = decode_linear(x, weight, **tensors, **rest)
    eager = decode_linear_eager(x, weight, **tensors, **rest)
    exact: Any = {name: None if t is None else t.double() for name, t in tensors.items()}
    truth = decode_linear_eager(x.double(), weight.double(), **exact, **rest)
    assert_no_worse([found], [eager], [truth])


@pytest.mark.parametrize("case", CASES)
def test_a_weight_of_8_bit_floats(case: dict[str, Any]) -> None:
    """Against the same numbers in float64; the codes times their scales, rounded to 16 bits, are what eager has."""
    N, K = 37, 80
    width = 2 * N if "activation" in case else N
    tensors: Any = {
        "bias": torch.randn(width).to(DEVICE, torch.float16) if case.get("bias") else None,
        "norm": (torch.rand(K) + 0.5).to(DEVICE, torch.float16) if case.get("norm") else None,
        "residual": torch.randn(1, N).to(DEVICE, torch.float16) if case.get("residual") else None,
    }
    rest = {name: value for name, value in case.items() if name not in tensors}
    x = (torch.randn(1, K) * 0.5).to(DEVICE, torch.float16)
    codes, scale = torch.randn(width, K).to(DEVICE, torch.float8_e4m3fn), (torch.rand(width) * 0.4).to(DEVICE)
    found = decode_linear(x, codes, scale=scale, **tensors, **rest)
    eager = decode_linear_eager(x, codes, scale=scale, **tensors, **rest)
    exact: Any = {name: None if t is None else t.double() for name, t in tensors.items()}
    truth = decode_linear_eager(x.double(), codes, scale=scale.double(), **exact, **rest)
    assert_no_worse([found], [eager], [truth])
