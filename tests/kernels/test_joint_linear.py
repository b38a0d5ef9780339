"""Projections of one input together: the results of one by one, gradients no further from the truth."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.truth import DEVICE, DTYPES, assert_no_worse, both_ways
from tightfit.kernels.joint_linear import joint_linear

SIZES = (24, 8, 8)


def separate(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, weight) for weight in weights)


def inputs(dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(shape).to(DEVICE, dtype) for shape in ((4, 64, 64), *((size, 64) for size in SIZES))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_worse_than_one_by_one(dtype: torch.dtype) -> None:
    tensors = inputs(dtype)
    truth = both_ways(separate, tensors, torch.float64)
    found, eager = (both_ways(run, tensors, dtype) for run in (joint_linear, separate))
    assert len(found) == 7
    assert_no_worse(found, eager, truth)


def test_only_what_is_wanted_and_used_gets_a_gradient() -> None:
    x, *weights = inputs(torch.float32)
    for tensor in (x, weights[0], weights[2]):
        tensor.requires_grad_()
    query, _, value = joint_linear(x, *weights)
    (query.sum() + 2 * value.sum()).backward()
    assert weights[1].grad is None
    assert x.grad is not None
    assert torch.allclose(x.grad, (weights[0].sum(0) + 2 * weights[2].sum(0)).detach().expand_as(x), atol=1e-4)
    assert weights[2].grad is not None
    assert torch.allclose(weights[2].grad, 2 * x.detach().sum((0, 1)).expand(8, 64), atol=1e-4)
    frozen = x.detach()
    joint_linear(frozen, *weights)[0].sum().backward()
    assert frozen.grad is None
