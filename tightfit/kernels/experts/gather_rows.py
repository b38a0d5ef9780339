"""Copies of rows of a matrix, in any order and any number: out[m] = x[rows[m]].

As torch's index_select, with wider loads and stores: a program copies PER_PROGRAM rows, 16 bytes a thread at a time. A
routed layer (routed_mlp.py) copies every token once per expert, three times a step, which is more bytes than anything
else it moves outside its products. Not differentiable by itself: its callers have backward passes of their own.
"""

import torch
from torch import Tensor

from tightfit.kernels.operators import on_device_of, operator
from tightfit.kernels.triton_support import Impl, tl, triton, use_triton

BLOCK, WARPS, PER_PROGRAM = 2048, 4, 2


def gather_rows(x: Tensor, rows: Tensor, *, impl: Impl = "auto") -> Tensor:
    """x[rows] for x [N, H] and rows [M]."""
    if not use_triton(impl, x):
        return x.index_select(0, rows)
    return _gather_rows(x, rows)


@triton.jit
def _gather_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    rows_ptr,
    out_ptr,
    count,
    width,
    x_stride,
    PER_PROGRAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < width
    first = tl.program_id(0).to(tl.int64) * PER_PROGRAM
    for i in tl.static_range(PER_PROGRAM):
        row = first + i
        if row < count:
            source = tl.load(rows_ptr + row).to(tl.int64) * x_stride
            tl.store(out_ptr + row * width + at, tl.load(x_ptr + source + at, mask=here), mask=here)


def _run_gather(x: Tensor, rows: Tensor) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = x.new_empty(len(rows), x.shape[1])
    if out.numel():
        block = min(BLOCK, triton.next_power_of_2(x.shape[1]))
        grid = (triton.cdiv(len(rows), PER_PROGRAM), triton.cdiv(x.shape[1], block))
        with on_device_of(x):
            _gather_kernel[grid](
                x,
                rows,
                out,
                len(rows),
                x.shape[1],
                x.stride(0),
                PER_PROGRAM=PER_PROGRAM,
                BLOCK=block,
                num_warps=WARPS,
            )
    return out


def _fake_gather(x: Tensor, rows: Tensor) -> Tensor:
    return torch.empty(len(rows), x.shape[1], dtype=x.dtype, device=x.device)


_gather_rows = operator("gather_rows(Tensor x, Tensor rows) -> Tensor", _run_gather, _fake_gather)
