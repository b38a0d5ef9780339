"""factor · x in another dtype, in one pass over the memory and with one rounding.

Torch multiplies and narrows in two passes, or in one whose loads are not vectorized. `factor` is a tensor: reading it
would make the host wait for the GPU.
"""

import torch
from torch import Tensor

from tightfit.kernels.triton_support import DTYPES, HAS_TRITON, tl, triton

BLOCK = 4096


def scaled_copy(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of contiguous `x`, multiplied by the one-element tensor `factor` and rounded to `dtype` once."""
    if not (type(x) is Tensor and x.is_cuda and HAS_TRITON and x.dtype in DTYPES and dtype in DTYPES):
        return (x * factor.view(())).to(dtype)
    out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    if x.numel():
        scaled_copy_kernel[(triton.cdiv(x.numel(), BLOCK),)](x.contiguous(), factor, out, x.numel(), BLOCK=BLOCK)
    return out


@triton.jit
def scaled_copy_kernel(x, factor, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One block of elements; the input is not needed again, so the cache is told."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    values = tl.load(x + at, mask=inside, eviction_policy="evict_first").to(tl.float32) * tl.load(factor)
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)
