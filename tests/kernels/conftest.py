"""Kernels run for real where there is a GPU, elsewhere in Triton's interpreter (tests/conftest.py turns it on)."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_numbers_and_exact_float32() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
