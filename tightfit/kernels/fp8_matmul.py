"""The product of two 8-bit matrices, A · Bᵀ, with the scales of both multiplied in: twice the rate of 16 bits.

    y[m, n] = s_a[m] · s_b[n] · Σ_k a[m, k] · b[n, k]

Scales are float32, one for a matrix ([]) or one per row ([M, 1] and [N, 1]); both factors have them the same way. On a
GPU this is torch._scaled_mm (cuBLASLt with a scale per matrix, CUTLASS with scales per row), which wants compute
capability 9.0 here and K and N in multiples of 16. Elsewhere the numbers are widened to float32 and multiplied plainly:
the same sums, as products of 8-bit numbers are exact in float32, in another order.

`fast` lets Hopper's matrix units add in 14 bits instead of moving sums to float32 registers on the way.
"""

import torch
from torch import Tensor

from tightfit.errors import UserError
from tightfit.kernels.operators import operator

NEEDED = (9, 0)


def fp8_matmul(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype = torch.bfloat16, *, fast: bool = True
) -> Tensor:
    """a [M, K] · b [N, K]ᵀ as [M, N]; both contiguous, not both e5m2."""
    return _matmul(a, b, a_scale, b_scale, dtype, fast)


def refuse_unfit_card(device: torch.device) -> None:
    """A sentence for cards without fast 8-bit products."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < NEEDED:
        name, found = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        raise UserError(
            f"levers.matmul asks for fp8, which needs compute capability 9.0 (Hopper), but {name} has "
            f"{found[0]}.{found[1]}; set it to native"
        )


def _run(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    if not a.is_cuda:
        return (a.float() @ b.float().t() * a_scale * b_scale.t()).to(dtype)
    return torch._scaled_mm(a, b.t(), a_scale, b_scale.t(), out_dtype=dtype, use_fast_accum=fast)


def _fake(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    return torch.empty(a.shape[0], b.shape[0], dtype=dtype, device=a.device)


_matmul = operator(
    "fp8_matmul(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, ScalarType dtype, bool fast) -> Tensor",
    _run,
    _fake,
)
