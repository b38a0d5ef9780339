"""What every kernel's test needs: where it runs, in which formats, and how wrong it may be.

The interpreter adds and multiplies bfloat16 wrongly (triton 3.7), so bfloat16 is tested on GPUs only.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if HAS_GPU else [])]


def error(found: Tensor, truth: Tensor) -> float:
    """‖found − truth‖ / ‖truth‖ in float64."""
    found, truth = found.detach().double().cpu(), truth.detach().double().cpu()
    assert found.shape == truth.shape
    return ((found - truth).norm() / truth.norm().clamp(min=1e-30)).item()


def assert_no_worse(found: Sequence[Tensor], eager: Sequence[Tensor], truth: Sequence[Tensor]) -> None:
    """Each result has eager's dtype and at most 1.1 × eager's own distance from the truth, plus float32's rounding."""
    for ours, reference, exact in zip(found, eager, truth, strict=True):
        assert ours.dtype == reference.dtype
        assert error(ours, exact) <= 1.1 * error(reference, exact) + 1e-6
