"""Products of groups of rows, against float64 and one product after another."""

from itertools import product

import pytest
import torch
from torch import Tensor

from tests.covering import covering, sampled
from tests.kernels.truth import DEVICE, DTYPES, assert_no_worse
from tightfit.errors import UserError
from tightfit.kernels.experts.grouped_matmul import (
    grouped_matmul,
    grouped_matmul_eager,
    grouped_outer,
    grouped_outer_eager,
)

COUNTS = [[5, 0, 17, 40], [0, 0, 3], [33, 0], [1, 1, 1]]
"""Rows of each group: empty ones, one that has all, one row each."""


def offsets_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts, device=DEVICE).cumsum(0).to(torch.int32)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, device=DEVICE).to(dtype)


SIZES = [(24, 40), (19, 33)]
CASES = list(product(DTYPES, COUNTS, (False, True), SIZES))


@pytest.mark.parametrize(("dtype", "counts", "transposed", "size"), covering(CASES, pairs=True), ids=str)
def test_rows_by_group(dtype: torch.dtype, counts: list[int], transposed: bool, size: tuple[int, int]) -> None:
    depth, columns = size
    x, offsets = random(sum(counts), depth, dtype=dtype), offsets_of(counts)
    weights = (
        random(len(counts), columns, depth, dtype=dtype).mT
        if transposed
        else (random(len(counts), depth, columns, dtype=dtype))
    )
    found = grouped_matmul(x, weights, offsets, impl="triton")
    eager, truth = (grouped_matmul_eager(x.to(to), weights.to(to), offsets) for to in (dtype, torch.float64))
    assert_no_worse([found], [eager], [truth])


@sampled(3)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(24, 40), (19, 33)])
def test_outer_products_by_group(dtype: torch.dtype, counts: list[int], n: int, k: int) -> None:
    rows, offsets = sum(counts), offsets_of(counts)
    a, b = random(rows, n, dtype=dtype), random(rows, k, dtype=dtype)
    found = grouped_outer(a, b, offsets, impl="triton")
    eager, truth = (grouped_outer_eager(a.to(to), b.to(to), offsets) for to in (dtype, torch.float64))
    assert found.shape == (len(counts), n, k)
    assert_no_worse([found], [eager], [truth])


def test_an_empty_group_has_no_gradient() -> None:
    offsets = offsets_of([3, 0, 2])
    found = grouped_outer(random(5, 4, dtype=torch.float32), random(5, 6, dtype=torch.float32), offsets, impl="triton")
    assert (found[1] == 0).all()


def test_shapes_that_do_not_fit() -> None:
    x, weights = torch.zeros(4, 3), torch.zeros(2, 5, 6)
    with pytest.raises(UserError, match=r"grouped_matmul got x \[4, 3\], weights \[2, 5, 6\]"):
        grouped_matmul(x, weights, offsets_of([2, 2]))
