"""Multi-tensor launches: a table of addresses, from which a program finds its tensor and its chunk of it.

One launch per weight means hundreds a step, which take the host longer than the GPU takes to update small weights. The
table is an int64 tensor of KINDS rows of addresses, then sizes, then the index of each tensor's first program. It is
made for every launch, as gradients have other addresses each time; a few kilobytes, copied asynchronously (and in a
CUDA graph, where addresses stay, once).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tightfit.kernels.capture import graph_constant
from tightfit.kernels.triton_support import tl, triton

CHUNK = 8192
"""Elements per program."""
MOST = 1024
"""Tensors of one table at most: each program reads the first program of every tensor to find its own."""

TRITON_DTYPES = {f"torch.{name}": getattr(tl, name, None) for name in ("float32", "bfloat16", "float16")}


def make_table(*kinds: Sequence[Tensor]) -> tuple[Tensor, int]:
    """The table of lists of tensors, alike in sizes and contiguous, and how many programs they need."""
    sizes = [tensor.numel() for tensor in kinds[0]]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // CHUNK))
    rows = [*([tensor.data_ptr() for tensor in kind] for kind in kinds), sizes, starts[:-1]]
    return graph_constant(torch.tensor(rows, dtype=torch.int64), kinds[0][0].device), starts[-1]


@triton.jit
def find_tensor(  # type: ignore[no-untyped-def]
    table_ptr, tensors, KINDS: tl.constexpr, CHUNK: tl.constexpr, MOST: tl.constexpr, ROUND: tl.constexpr
):
    """Which tensor this program works on, its size, and the first element to do; sizes are multiples of ROUND."""
    program = tl.program_id(0)
    index = tl.arange(0, MOST)
    starts_ptr = table_ptr + (KINDS + 1) * tensors
    starts = tl.load(starts_ptr + index, mask=index < tensors, other=2**40)
    which = tl.sum((starts <= program).to(tl.int32), 0) - 1
    size = tl.multiple_of(tl.load(table_ptr + KINDS * tensors + which), ROUND)
    first = tl.multiple_of((program - tl.load(starts_ptr + which)) * CHUNK, 16)
    return which, size, first


@triton.jit
def address(table_ptr, tensors, which, KIND: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pointer to a tensor's first element, a multiple of 16 bytes: allocators align to that, and callers check it."""
    return tl.multiple_of(tl.load(table_ptr + KIND * tensors + which).to(tl.pointer_type(DTYPE)), 16)


def rounding(tensors: Sequence[Tensor]) -> int:
    """16 where all sizes are multiples of 16, so that kernels move 16 bytes at a time up to the end; else 1."""
    return 1 if any(tensor.numel() % 16 for tensor in tensors) else 16


def are_alike(*kinds: Sequence[Tensor]) -> bool:
    """Whether these tensors have one dtype, are contiguous and begin where kernels may read 16 bytes at a time."""
    dtype = kinds[0][0].dtype
    return all(t.dtype == dtype and t.is_contiguous() and t.data_ptr() % 16 == 0 for kind in kinds for t in kind)
