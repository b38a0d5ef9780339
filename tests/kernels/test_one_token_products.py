"""Products of one token with coded weights, and all that may stand before and after them, against eager."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.covering import covering, sampled
from tests.kernels.test_quantized_linear import weights
from tests.kernels.truth import DEVICE, HAS_GPU, assert_no_worse, error
from tightfit.kernels.decoding.decode_linear import decode_linear_eager
from tightfit.kernels.quantized.fp8_rows import expand_fp8, fp8_rows
from tightfit.kernels.quantized.fp8_vector import fp8_vector
from tightfit.kernels.quantized.packed_vector import packed_vector, takes_vector
from tightfit.kernels.quantized.quantized_linear import expanded_eager

DTYPES = [torch.float16, *([torch.bfloat16] if HAS_GPU else [])]
AROUND: list[dict[str, Any]] = [
    {},
    {"norm": True, "norm_eps": 1e-5, "bias": True},
    {"norm": True, "norm_eps": 1e-6, "norm_offset": 1.0, "residual": True},
    {"norm": True, "norm_eps": 1e-5, "activation": "silu"},
    {"bias": True, "activation": "gelu_tanh"},
]
SHAPES = [(4, 128, True), (4, 256, False), (4, 0, True), (8, 64, True), (8, 0, False)]
"""Bits, group, whether there are zero points."""


def surroundings(
    case: dict[str, Any], outputs: int, inputs: int, dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors of a case, and its numbers."""
    width = outputs * (2 if "activation" in case else 1)
    made = {
        "bias": torch.randn(width) if case.get("bias") else None,
        "norm": torch.rand(inputs) + 0.5 if case.get("norm") else None,
        "residual": torch.randn(1, outputs) if case.get("residual") else None,
    }
    tensors = {name: None if tensor is None else tensor.to(DEVICE, dtype) for name, tensor in made.items()}
    return tensors, {name: value for name, value in case.items() if name not in made}


def wide(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: None if tensor is None else tensor.double() for name, tensor in tensors.items()}


def assert_as_eager(found: Tensor, x: Tensor, weight: Tensor, tensors: dict[str, Any], rest: dict[str, Any]) -> None:
    """No farther from the product in float64 than the same in x's dtype, whose weights are rounded to it."""
    eager = decode_linear_eager(x, weight.to(x.dtype), **tensors, **rest)
    truth = decode_linear_eager(x.double(), weight, **wide(tensors), **rest)
    assert_no_worse([found], [eager], [truth])


@sampled(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "case"), covering(list(product(SHAPES, AROUND))), ids=str)
def test_packed(shape: tuple[int, int, bool], case: dict[str, Any], dtype: torch.dtype) -> None:
    bits, group, zeros = shape
    torch.manual_seed(bits + group)
    outputs, inputs = 16, 768
    tensors, rest = surroundings(case, outputs, inputs, dtype)
    words, scale, zero = weights(inputs, outputs * (2 if "activation" in case else 1), bits, group, zeros)
    assert takes_vector(words, bits, group, dtype)
    x = torch.randn(1, inputs).to(DEVICE, dtype)
    found = packed_vector(x, words, scale, zero, bits, group, **tensors, **rest)
    assert_as_eager(found, x, expanded_eager(words, scale, zero, bits, inputs, torch.float64), tensors, rest)


@pytest.mark.parametrize("bits", [4, 8])
def test_logits_are_not_rounded_to_the_dtype_of_states(bits: int) -> None:
    """What an output projection's products are compared by: in float32 they are those of x's dtype before rounding."""
    words, scale, zero = weights(768, 48, bits, 128, True)
    torch.manual_seed(2)
    x = torch.randn(1, 768).to(DEVICE, torch.float16)
    rounded = packed_vector(x, words, scale, zero, bits, 128)
    exact = packed_vector(x, words, scale, zero, bits, 128, out_dtype=torch.float32)
    assert exact.dtype == torch.float32
    assert torch.equal(exact.half(), rounded)
    assert not torch.equal(exact, rounded.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_of_any_size_are_kept(dtype: torch.dtype) -> None:
    """One input a thousand times its neighbours, a tile of zeros, a tile of tiny ones: each tile has its own scale."""
    words, scale, zero = weights(384, 16, 4, 128, True)
    torch.manual_seed(1)
    x = torch.randn(1, 384)
    x[0, 5], x[0, 128:256], x[0, 256:384] = 3000.0, 0.0, x[0, 256:384] * 1e-3
    x = x.to(DEVICE, dtype)
    weight = expanded_eager(words, scale, zero, 4, 384, torch.float64)
    assert_as_eager(packed_vector(x, words, scale, zero, 4, 128), x, weight, {}, {})
    for first in (0, 256):
        alone = torch.zeros_like(x)
        alone[:, first : first + 128] = x[:, first : first + 128]
        assert_as_eager(packed_vector(alone, words, scale, zero, 4, 128), alone, weight, {}, {})


@pytest.mark.parametrize(("bits", "group", "rows"), [(2, 256, 32), (4, 64, 32), (4, 128, 40), (3, 0, 32)])
def test_what_the_kernel_does_not_take(bits: int, group: int, rows: int) -> None:
    words = torch.zeros(rows, 768 * bits // 32, dtype=torch.int32)
    assert not takes_vector(words, bits, group, torch.float16)
    assert not takes_vector(torch.zeros(32, 96, dtype=torch.int32), 4, 128, torch.float32)


def coded(outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """8-bit floats, subnormal ones and both zeros among them, and scales."""
    codes = torch.randn(outputs, inputs)
    codes[0, :8] = torch.tensor([0.0, -0.0, 2.0**-9, -(2.0**-8), 448.0, -448.0, 2.0**-6, 1.875])
    return codes.to(torch.float8_e4m3fn).to(DEVICE), (torch.rand(outputs) * 0.4 + 0.1).to(DEVICE)


@sampled(2)
@pytest.mark.parametrize("case", AROUND, ids=str)
def test_8_bit_floats(case: dict[str, Any]) -> None:
    """In bfloat16; the interpreter, which multiplies in float32, gets float16."""
    torch.manual_seed(0)
    dtype = DTYPES[-1]
    outputs, inputs = 10, 1552
    tensors, rest = surroundings(case, outputs, inputs, dtype)
    codes, scale = coded(outputs * (2 if "activation" in case else 1), inputs)
    x = torch.randn(1, inputs).to(DEVICE, dtype)
    found = fp8_vector(x, codes, scale, **tensors, **rest)
    assert_as_eager(found, x, codes.double() * scale.double()[:, None], tensors, rest)


@sampled(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(2, 48, 160), (17, 33, 64), (40, 20, 96)])
def test_some_tokens_by_8_bit_floats(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    codes, scale = coded(outputs, inputs)
    x = torch.randn(rows, inputs).to(DEVICE, dtype)
    weight = codes.double() * scale.double()[:, None]
    assert_as_eager(fp8_rows(x, codes, scale), x, weight, {}, {})
    made = expand_fp8(codes, scale, dtype)
    assert torch.equal(made.cpu(), (codes.cpu().float() * scale.cpu()[:, None]).to(dtype))
    assert error(made, weight) < 2 ** (-8 if dtype == torch.bfloat16 else -11)
