"""LayerNorm's kernel against float64 and plain torch; what it shares with RMSNorm is tested there."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.covering import sampled
from tests.kernels.truth import DEVICE, DTYPES, HAS_GPU, assert_no_worse, both_ways, error
from tightfit.kernels.norm.layer_norm import layer_norm, layer_norm_eager

EPS = 0.1
SHAPES = [(7, 2), (3, 1, 33), (30, 64), (3, 2055 if HAS_GPU else 1030)]


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """x, residual, weight, bias."""
    shapes = (shape, shape, shape[-1:], shape[-1:])
    return [torch.randn(size, dtype=torch.float64, device=DEVICE).to(dtype) for size in shapes]


@sampled(3)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_worse_than_eager(dtype: torch.dtype, shape: tuple[int, ...], with_residual: bool) -> None:
    tensors = inputs(shape, dtype)

    def ours(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        if with_residual:
            return layer_norm(x, weight, bias, EPS, residual=residual, impl="triton")
        return layer_norm(x, weight, bias, EPS, impl="triton"), residual * 1

    def eager(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        if with_residual:
            return layer_norm_eager(x, weight, bias, EPS, residual=residual)
        return layer_norm_eager(x, weight, bias, EPS)[0], residual * 1

    found, reference = both_ways(ours, tensors, dtype), both_ways(eager, tensors, dtype)
    assert_no_worse(found, reference, both_ways(eager, tensors, torch.float64))


def test_reference_and_plain_path_are_torchs() -> None:
    x, residual, weight, bias = inputs((4, 3, 10), torch.float64)
    wanted = F.layer_norm(x + residual, weight.shape, weight, bias, EPS)
    assert torch.allclose(layer_norm_eager(x, weight, bias, EPS, residual=residual)[0], wanted, rtol=1e-12)
    y, s = layer_norm(x, weight, bias, EPS, residual=residual, impl="torch")
    assert torch.equal(y, wanted)
    assert torch.equal(s, x + residual)


def test_without_bias() -> None:
    x, _, weight, _ = inputs((9, 24), torch.float32)
    found = both_ways(lambda x, w: layer_norm(x, w, None, EPS, impl="triton"), (x, weight), torch.float32)
    wanted = both_ways(lambda x, w: F.layer_norm(x, w.shape, w, None, EPS), (x, weight), torch.float32)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted, strict=True))


def test_only_the_bias_is_trained() -> None:
    x, _, weight, bias = inputs((9, 24), torch.float32)
    bias.requires_grad_()
    y = layer_norm(x, weight, bias, EPS, impl="triton")
    gradient = torch.randn_like(y)
    assert torch.allclose(torch.autograd.grad(y, bias, gradient)[0], gradient.sum(0), atol=1e-5)


def test_rows_far_from_zero_lose_nothing() -> None:
    """E[x²] − E[x]² of such rows would be all rounding."""
    x, _, weight, bias = inputs((5, 200), torch.float32)
    far = (x + 3000).detach()
    truth = layer_norm_eager(far.double(), weight.double(), bias.double(), 1e-6)[0]
    assert error(layer_norm(far, weight, bias, 1e-6, impl="triton"), truth) < 1e-3
