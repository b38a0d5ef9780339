"""These tests need a CUDA device: without one the folder is passed over; `make test-gpu` runs it."""

from pathlib import Path

import pytest
import torch


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Collect nothing here on a machine without a GPU."""
    return None if torch.cuda.is_available() else True


@pytest.fixture(autouse=True)
def _exact_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
