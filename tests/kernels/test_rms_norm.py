"""RMSNorm's kernel against float64 and against plain torch in the same format; residual, offset, strides, dtypes."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.covering import covering, sampled
from tests.kernels.truth import DEVICE, DTYPES, HAS_GPU, assert_no_worse, both_ways
from tightfit.errors import UserError
from tightfit.kernels.norm.rms_norm import rms_norm, rms_norm_eager

EPS = 0.1  # large enough that the gradient of a row of one element is not all rounding
# One element, odd widths, powers of two, rows that share a program, that leave a remainder and that have it alone.
SHAPES = [(7, 1), (1, 3), (33, 64), (5, 2, 7, 20), (3, 257), (29, 128), (3, 4100 if HAS_GPU else 1030)]


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x, residual = torch.randn(2, *shape, dtype=torch.float64, device=DEVICE).to(dtype)
    return x, residual, torch.randn(shape[-1], dtype=torch.float64, device=DEVICE).to(dtype)


CASES = list(product(DTYPES, SHAPES, (0.0, 1.0)))


@sampled(3)
@pytest.mark.parametrize(("dtype", "shape", "offset"), covering(CASES, pairs=True), ids=str)
def test_no_worse_than_eager(dtype: torch.dtype, shape: tuple[int, ...], offset: float) -> None:
    x, _, weight = inputs(shape, dtype)

    def eager(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm_eager(x, weight, EPS, offset=offset)[0]

    found = both_ways(lambda x, w: rms_norm(x, w, EPS, offset=offset, impl="triton"), (x, weight), dtype)
    assert_no_worse(found, both_ways(eager, (x, weight), dtype), both_ways(eager, (x, weight), torch.float64))


@sampled(3)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residual_in_the_same_pass(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensors = inputs(shape, dtype)

    def eager(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return rms_norm_eager(x, weight, EPS, residual=residual)

    found = both_ways(lambda x, r, w: rms_norm(x, w, EPS, residual=r, impl="triton"), tensors, dtype)
    assert_no_worse(found, both_ways(eager, tensors, dtype), both_ways(eager, tensors, torch.float64))
    assert torch.equal(found[2], found[3])  # x and residual share a gradient


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("with_residual", [False, True])
def test_the_plain_path_follows_the_same_formula(with_residual: bool, offset: float) -> None:
    x, residual, weight = inputs((3, 5, 12), torch.float64)
    extra = residual if with_residual else None
    found = rms_norm(x, weight, EPS, offset=offset, residual=extra, impl="torch")
    y, s = rms_norm_eager(x, weight, EPS, offset=offset, residual=extra)
    for a, b in zip(found if with_residual else (found,), (y, s) if with_residual else (y,), strict=True):
        assert torch.allclose(a, b, rtol=1e-12)
    plain = F.rms_norm(s, weight.shape, weight + offset, EPS)
    assert torch.allclose(y, plain, rtol=1e-12)


def test_only_one_of_the_two_results_is_used() -> None:
    x, residual, weight = (t.requires_grad_() for t in inputs((6, 40), torch.float32))
    y, s = rms_norm(x, weight, EPS, residual=residual, impl="triton")
    assert torch.equal(torch.autograd.grad(s.sum(), x, retain_graph=True)[0], torch.ones_like(x))
    found = torch.autograd.grad(y.square().sum(), (x, weight))
    wanted = torch.autograd.grad(rms_norm_eager(x, weight, EPS, residual=residual)[0].square().sum(), (x, weight))
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_frozen_inputs_get_no_gradient(frozen: str) -> None:
    x, _, weight = inputs((9, 24), torch.float32)
    (weight if frozen == "x" else x).requires_grad_()
    rms_norm(x, weight, EPS, impl="triton").sum().backward()  # the gradient of a sum is one number seen everywhere
    given = {"x": x, "weight": weight}
    trained = given.pop("weight" if frozen == "x" else "x")
    assert given[frozen].grad is None
    wanted = torch.autograd.grad(rms_norm_eager(x, weight, EPS)[0].sum(), trained)[0]
    assert trained.grad is not None
    assert torch.allclose(trained.grad, wanted, rtol=1e-4, atol=1e-5)


def views() -> dict[str, Tensor]:
    wide = torch.randn(4, 6, 50, device=DEVICE)
    return {
        "rows apart": wide[..., 5:37],
        "transposed": wide.transpose(0, 1),
        "column major": torch.randn(8, 4, 6, device=DEVICE).permute(1, 2, 0),
        "expanded": wide[:1].expand(3, -1, -1),
        "one row": wide[0, 0],
        "no rows": wide[:0],
    }


@pytest.mark.parametrize("name", views())
def test_strides(name: str) -> None:
    x = views()[name].requires_grad_()
    weight = torch.randn(x.shape[-1], device=DEVICE, requires_grad=True)
    y = rms_norm(x, weight, EPS, impl="triton")
    wanted = rms_norm_eager(x, weight, EPS)[0]
    assert torch.allclose(y, wanted, atol=1e-5)
    gradient = torch.randn(y.shape[::-1], device=DEVICE).permute(*reversed(range(y.ndim)))
    for a, b in zip(
        torch.autograd.grad(y, (x, weight), gradient), torch.autograd.grad(wanted, (x, weight), gradient), strict=True
    ):
        assert a.shape == b.shape
        assert torch.allclose(a, b, atol=1e-4)


def test_float32_weights_and_residual_stream_beside_low_precision() -> None:
    x, residual, weight = inputs((6, 40), torch.float32)
    low = x.half().requires_grad_()
    y, s = rms_norm(low, weight, EPS, residual=residual.requires_grad_(), impl="triton")
    assert y.dtype == s.dtype == torch.float32
    assert torch.equal(s, low + residual)
    d_low, d_residual = torch.autograd.grad(y.square().sum() + s.sum(), (low, residual))
    assert (d_low.dtype, d_residual.dtype) == (torch.float16, torch.float32)
    assert torch.equal(d_low, d_residual.half())
    assert rms_norm(low, weight, EPS, impl="triton").dtype == torch.float16


def test_same_inputs_same_bits() -> None:
    x, _, weight = inputs((301, 48), torch.float32)
    runs = [both_ways(lambda x, w: rms_norm(x, w, EPS, impl="triton"), (x, weight), torch.float32) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_registered_properly() -> None:
    x, residual, weight = (t.requires_grad_() for t in inputs((5, 12), torch.float32))
    op = torch.ops.tightfit.row_norm.default
    torch.library.opcheck(op, (x, weight, None, None, EPS, 1.0, False, False))
    torch.library.opcheck(op, (x, weight, weight.detach().clone().requires_grad_(), residual, EPS, 0.0, True, False))


def test_inside_compile_checkpoint_and_autocast() -> None:
    x, residual, weight = (t.requires_grad_() for t in inputs((5, 12), torch.float32))

    def block(x: Tensor, residual: Tensor) -> Tensor:
        y, s = rms_norm(x, weight, EPS, residual=residual, impl="triton")
        return (y.tanh() * s).sum()

    wanted = torch.autograd.grad(block(x, residual), (x, residual, weight))
    ways = {
        "checkpoint": lambda: torch.utils.checkpoint.checkpoint(block, x, residual, use_reentrant=False),
        "compile": lambda: torch.compile(block, backend="aot_eager", fullgraph=True)(x, residual),
    }
    for way in ways.values():
        for a, b in zip(torch.autograd.grad(way(), (x, residual, weight)), wanted, strict=True):
            assert torch.allclose(a, b, atol=1e-5)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert rms_norm(x, weight, EPS, impl="triton").dtype == torch.float32


def test_refused() -> None:
    x = torch.randn(2, 4)
    with pytest.raises(UserError, match="'tritn'; give one of auto, triton, torch"):
        rms_norm(x, x[0], EPS, impl="tritn")  # type: ignore[call-overload]
    with pytest.raises(UserError, match=r"not torch\.float64"):
        rms_norm(x.double(), x[0].double(), EPS, impl="triton")
