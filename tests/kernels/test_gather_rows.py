"""Copies of rows, which are exact."""

import pytest
import torch

from tests.kernels.truth import DEVICE, DTYPES
from tightfit.kernels.experts.gather_rows import gather_rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "count"), [(7, 24, 13), (5, 33, 4), (3, 8, 0), (1, 2100, 3)])
def test_rows_are_copied(dtype: torch.dtype, rows: int, width: int, count: int) -> None:
    x = torch.randn(rows, width, device=DEVICE).to(dtype)
    picked = torch.randint(0, rows, (count,), device=DEVICE)
    for given in (x, x.repeat(1, 2)[:, :width], x.T.contiguous().T):
        assert torch.equal(gather_rows(given, picked, impl="triton"), x[picked])
        assert torch.equal(gather_rows(given, picked, impl="torch"), x[picked])
