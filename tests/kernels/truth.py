"""What every kernel's test needs: where it runs, in which formats, and how wrong it may be.

The interpreter adds and multiplies bfloat16 wrongly (triton 3.7), so bfloat16 is tested on GPUs only.
"""

from collections.abc import Callable, Sequence

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


def assert_no_worse(
    found: Sequence[Tensor], eager: Sequence[Tensor], truth: Sequence[Tensor], *, rounding: float = 1e-6
) -> None:
    """Each result has eager's dtype and at most 1.1 × eager's own distance from the truth, plus float32's rounding."""
    for ours, reference, exact in zip(found, eager, truth, strict=True):
        assert ours.dtype == reference.dtype
        assert error(ours, exact) <= 1.1 * error(reference, exact) + rounding


def both_ways(
    run: Callable[..., Tensor | tuple[Tensor, ...]], tensors: Sequence[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """Results of `run` on `tensors` in `dtype`, and the gradients that fixed random gradients of the results give.

    Those random gradients are rounded to what `tensors` are in, as all inputs are: every `dtype` sees the same numbers.
    """
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
    results = run(*leaves)
    results = (results,) if isinstance(results, Tensor) else results
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(r.shape, generator=generator).to(r.device, tensors[0].dtype).to(r.dtype) for r in results]
    return [*results, *torch.autograd.grad(results, leaves, given)]
