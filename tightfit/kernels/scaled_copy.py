"""factor · x in another dtype, in one pass over the memory and with one rounding.

Torch multiplies and casts in two passes, or in one whose loads are not vectorized. `factor` is a tensor, so that the
host does not wait for the GPU.
"""

import torch
from torch import Tensor

from tightfit.kernels.operators import empty_like, operator
from tightfit.kernels.triton_support import DTYPES, HAS_TRITON, tl, triton

BLOCK = 4096


def scaled_copy(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of contiguous `x`, multiplied by the one-element tensor `factor` and rounded to `dtype` once."""
    return _scaled_copy(x, factor, dtype)


def _fake(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return empty_like(x, dtype)


def _run(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    if not (x.is_cuda and HAS_TRITON and x.dtype in DTYPES and dtype in DTYPES):
        return (x * factor.view(())).to(dtype)
    out = _fake(x, factor, dtype)
    if x.numel():
        scaled_copy_kernel[(triton.cdiv(x.numel(), BLOCK),)](x.contiguous(), factor, out, x.numel(), BLOCK=BLOCK)
    return out


_scaled_copy = operator("scaled_copy(Tensor x, Tensor factor, ScalarType dtype) -> Tensor", _run, _fake)


@triton.jit
def scaled_copy_kernel(x, factor, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One block of elements; the input is not read again, hence evict_first."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    values = tl.load(x + at, mask=inside, eviction_policy="evict_first").to(tl.float32) * tl.load(factor)
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)
