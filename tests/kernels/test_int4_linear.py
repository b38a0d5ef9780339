"""4-bit products of a CPU: what they round and nothing else, and codes that come back."""

import os
import subprocess
import sys
from itertools import product

import pytest
import torch

from tests.covering import covering, thorough
from tightfit.kernels.quantized.int4_linear import (
    GROUPS,
    code_order,
    int4_linear,
    int4_linear_eager,
    int4_scales,
    pack_int4,
    takes_int4,
    unpack_int4,
)

here = pytest.mark.skipif(code_order() is None, reason="this CPU's torch has no fast product with 4-bit codes")

ROUNDING = 2.0**-8
"""Half of bfloat16's spacing at one."""


def _weight(outputs: int, inputs: int, group: int, *, zero: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and scales as the product takes them."""
    generator = torch.Generator().manual_seed(outputs + group)
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator, dtype=torch.uint8)
    scale = torch.rand(outputs, inputs // group, generator=generator) + 0.1
    zeros = torch.randint(0, 16, scale.shape, generator=generator) if zero else None
    return codes, int4_scales(scale, zeros)


CASES = list(product((1, 3, 5, 20), GROUPS, (False, True)))


@here
@pytest.mark.parametrize(("rows", "group", "zero"), covering(CASES, pairs=True))
def test_rounds_inputs_scales_and_results_only(rows: int, group: int, zero: bool) -> None:
    codes, scales = _weight(192, 512, group, zero=zero)
    x = torch.randn(2, rows, 512, generator=torch.Generator().manual_seed(rows))
    made, eager = int4_linear(x, pack_int4(codes), scales, group), int4_linear_eager(x, codes, scales, group)
    assert made.shape == (2, rows, 192)
    assert made.dtype == torch.float32
    error = torch.linalg.vector_norm(made - eager) / torch.linalg.vector_norm(eager)
    assert error <= ROUNDING  # sums in another order may round to the other neighbour


@here
def test_scales_and_zero_points_are_the_weights() -> None:
    """In float64: (q − Z) · S, off by the roundings of S, up to 8 times, and of o, which is 8 S at most."""
    scale, zero = torch.rand(64, 4) + 0.1, torch.randint(0, 16, (64, 4))
    codes = torch.randint(0, 16, (64, 128), dtype=torch.uint8)
    true = (codes.double().unflatten(1, (4, -1)) - zero[..., None]) * scale.double()[..., None]
    s, o = int4_scales(scale, zero).double().unbind(-1)
    found = (codes.double().unflatten(1, (4, -1)) - 8) * s.T[..., None] + o.T[..., None]
    assert ((found - true).abs() <= ROUNDING * (8 + 8) * scale.double()[..., None]).all()


@here
def test_codes_come_back_and_strips_can_be_cut() -> None:
    codes, scales = _weight(320, 96, 32, zero=True)
    packed = pack_int4(codes)
    assert packed.nbytes == codes.numel() // 2
    assert torch.equal(unpack_int4(packed), codes)
    parts = [pack_int4(part) for part in codes.split([64, 256])]
    assert torch.equal(torch.cat(parts), packed)
    x = torch.randn(4, 96)
    cut = int4_linear(x, packed[64:], scales[:, 64:], 32)
    assert torch.equal(cut, int4_linear(x, packed, scales, 32)[:, 64:])


def test_what_is_not_taken() -> None:
    takes = code_order() is not None
    assert takes_int4(64, 64, 4, 32) is takes
    assert takes_int4(640, 384, 4, 128) is takes
    for outputs, inputs, bits, group in ((48, 64, 4, 32), (64, 64, 8, 32), (64, 64, 4, 0), (64, 64, 4, 16)):
        assert not takes_int4(outputs, inputs, bits, group)


def test_a_cpu_without_vectors_has_no_fast_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch names it; `test_on_another_cpu` has torch itself take one for that."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert code_order.__wrapped__() is None


@here
@pytest.mark.parametrize(("capability", "takes"), [("avx2", True), thorough("default", False)])
def test_on_another_cpu(capability: str, takes: bool) -> None:
    """Whose order of codes is another, or which has no fast product."""
    code = (
        "import torch\n"
        "from tightfit.kernels.quantized.int4_linear import *\n"
        "codes = torch.randint(0, 16, (128, 64), dtype=torch.uint8)\n"
        "scales, x = int4_scales(torch.rand(128, 2), None), torch.randn(3, 64)\n"
        "print(code_order() is not None)\n"
        "if code_order() is not None:\n"
        "    made, eager = int4_linear(x, pack_int4(codes), scales, 32), int4_linear_eager(x, codes, scales, 32)\n"
        "    assert torch.equal(unpack_int4(pack_int4(codes)), codes)\n"
        "    assert torch.linalg.vector_norm(made - eager) <= 2.0**-8 * torch.linalg.vector_norm(eager)\n"
    )
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ran.stderr == ""
    assert ran.stdout.split() == [str(takes)]
