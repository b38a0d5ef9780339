"""√Σ g² over many gradients in one launch, in float32 whatever their dtype.

Each program sums the squares of its chunk, and torch adds the chunks in a fixed order, so results are deterministic.
torch._foreach_norm reads bf16 at 2 360 GB/s on an H200, which can do 4 200: 6.8 ms of an 8B model's step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tightfit.kernels.operators import on_device_of, operator
from tightfit.kernels.tensor_table import (
    CHUNK,
    MOST,
    TRITON_DTYPES,
    address,
    are_alike,
    find_tensor,
    make_table,
    rounding,
)
from tightfit.kernels.triton_support import Impl, tl, triton, use_triton

BLOCK = 4096
WARPS = 8


def gradient_norm(gradients: Sequence[Tensor], impl: Impl = "auto") -> Tensor:
    """The norm of all of them together, a float32 scalar."""
    norm: Tensor = _gradient_norm(list(gradients), impl)
    return norm


@triton.jit
def squares_kernel(  # type: ignore[no-untyped-def]
    table_ptr,
    out_ptr,
    tensors,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUND: tl.constexpr,
):
    which, size, first = find_tensor(table_ptr, tensors, 1, CHUNK, MOST, ROUND)
    g_ptr = address(table_ptr, tensors, which, 0, DTYPE)
    total = tl.zeros((BLOCK,), tl.float32)
    for block in range(0, CHUNK, BLOCK):
        at = first + block + tl.arange(0, BLOCK)
        g = tl.load(g_ptr + at, mask=at < size, other=0).to(tl.float32)
        total += g * g
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))


def _launch(gradients: list[Tensor]) -> Tensor:
    sums = []
    for begin in range(0, len(gradients), MOST):
        part = gradients[begin : begin + MOST]
        table, programs = make_table(part)
        squares = torch.empty(programs, dtype=torch.float32, device=table.device)
        with on_device_of(table):
            squares_kernel[(programs,)](
                table,
                squares,
                len(part),
                DTYPE=TRITON_DTYPES[str(part[0].dtype)],
                CHUNK=CHUNK,
                MOST=MOST,
                BLOCK=BLOCK,
                ROUND=rounding(part),
                num_warps=WARPS,
            )
        sums.append(squares.sum())
    return torch.stack(sums).sum().sqrt()


def _run(gradients: list[Tensor], impl: Impl) -> Tensor:
    full = [gradient for gradient in gradients if gradient.numel()]
    if full and use_triton(impl, full[0]) and are_alike(full):
        return _launch(full)
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(list(norms)))


def _fake(gradients: list[Tensor], impl: str) -> Tensor:
    return gradients[0].new_empty((), dtype=torch.float32)


_gradient_norm = operator("gradient_norm(Tensor[] gradients, str impl) -> Tensor", _run, _fake)
