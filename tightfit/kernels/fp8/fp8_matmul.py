"""fp8 GEMM: A · Bᵀ times the scales of both, at twice the rate of 16 bits.

    y[m, n] = s_a[m] · s_b[n] · Σ_k a[m, k] · b[n, k]

Scales are float32, one per matrix ([]) or one per row ([M, 1] and [N, 1]), the same for both operands. On GPUs this is
torch._scaled_mm (cuBLASLt with a scale per matrix, CUTLASS with scales per row), used from compute capability 9.0 on; K
and N are multiples of 16. On CPUs the codes are cast to float32 and multiplied: products of fp8 numbers are exact in
float32, so only the order of the sums differs.

`fast` lets Hopper's tensor cores accumulate in 14 bits instead of adding partial sums in float32 registers.
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
    """Raise a UserError for GPUs without fp8 tensor cores."""
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
