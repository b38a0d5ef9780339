"""Kernels that fuse act(g) · u: those that leave u as it is refuse the activation that changes it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tightfit import kernels
from tightfit.kernels.decoding.decode_linear import decode_linear, decode_linear_eager
from tightfit.kernels.fp8.fp8_codes import WeightCodes
from tightfit.kernels.fp8.fp8_mlp import fp8_gated_mlp
from tightfit.kernels.mlp.gated_mlp import gated_mlp
from tightfit.kernels.mlp.glu import glu_eager
from tightfit.kernels.quantized.fp8_vector import fp8_vector
from tightfit.kernels.quantized.packed_rows import launch_packed_rows, row_tiles_for
from tightfit.kernels.quantized.packed_vector import packed_vector
from tightfit.models.spec import Activation

CLAMPED: Activation = "swiglu_clamped"


def packed() -> tuple[Tensor, Tensor, Tensor, None, int, int]:
    """Input, words and scales of a weight of 32 × 768 in 4 bits."""
    words, scale = torch.zeros(32, 96, dtype=torch.int32), torch.ones(32, 6, dtype=torch.float16)
    return torch.randn(1, 768).half(), words, scale, None, 4, 128


def one_mlp() -> Tensor:
    x, weight = torch.randn(2, 8), torch.randn(6, 8)
    return gated_mlp(x, weight, weight, weight.T, CLAMPED)


def fp8_mlp() -> Tensor:
    first, second, third = (WeightCodes("tensor", False) for _ in range(3))
    x, weight = torch.randn(4, 16).bfloat16(), torch.randn(32, 16).bfloat16()
    return fp8_gated_mlp(x, weight, weight, weight.T, CLAMPED, (first, second, third))


def one_token_of_8_bit_floats() -> Tensor:
    codes = torch.randn(32, 768).to(torch.float8_e4m3fn)
    return fp8_vector(torch.randn(1, 768).bfloat16(), codes, torch.ones(32), activation=CLAMPED)


FUSED: dict[str, Callable[[], Tensor]] = {
    "gated_mlp": one_mlp,
    "fp8_mlp": fp8_mlp,
    "decode_linear": lambda: decode_linear(torch.randn(1, 8), torch.randn(12, 8), activation=CLAMPED),
    "packed_rows": lambda: launch_packed_rows(*packed(), row_tiles_for(32, 768, 4), None, CLAMPED),
    "packed_vector": lambda: packed_vector(*packed(), activation=CLAMPED),
    "fp8_vector": one_token_of_8_bit_floats,
}
"""Each by its file in tightfit/kernels."""


@pytest.mark.parametrize("name", FUSED)
def test_kernels_that_leave_up_as_it_is_refuse_what_changes_it(name: str) -> None:
    with pytest.raises(ValueError, match="has no swiglu_clamped, which also clamps up and adds one to it; use glu"):
        FUSED[name]()


def test_these_are_all_kernels_that_leave_up_as_it_is() -> None:
    found = set()
    for path in Path(kernels.__file__).parent.rglob("*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        if any("= activated(" in line for line in lines) and not any("= factored(" in line for line in lines):
            found.add(path.stem)
        if "from tightfit.kernels.quantized.vector_end import" in "\n".join(lines):
            found.add(path.stem)
    assert found - {"vector_end"} == FUSED.keys()


def test_the_reference_of_products_of_one_token_changes_up_too() -> None:
    x, weight = torch.randn(1, 8), 9 * torch.randn(12, 8)
    gate, up = (x @ weight.T).chunk(2, dim=-1)
    found = decode_linear_eager(x, weight, activation=CLAMPED)
    torch.testing.assert_close(found, glu_eager(gate, up, CLAMPED))
