"""LoRA adapters of many requests in one step: each row of a product gets what the adapter of its request adds.

    y[n] += B_a (A_a x[n])        a is the adapter of row n, none where a < 0        x [N, K], A_a [r, K], B_a [M, r]

Such a product may be of several projections of one input, each with an A and a B of its own. Adapters differ in rank
and need not change every projection, so their matrices stay where they are and a table has the addresses (as in
Punica's BGMV, Chen et al. 2023). Every row has programs of its own, for a row of A or for some rows of B: meant for
steps of few rows, where matrices are read from the L2 cache after the first row that needs them. Rows of an adapter
that are many are better multiplied together (`low_rank_rows_eager` does that). With `overlap` (kernels/overlap.py) a
program finds its matrices, and reads its part of B, before the kernel before it has ended.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.kernels.operators import on_device_of
from tightfit.kernels.overlap import launch_next, pdl, wait_for_previous
from tightfit.kernels.tensor_table import TRITON_DTYPES, address
from tightfit.kernels.triton_support import Impl, is_interpreted, tl, triton, use_triton

Pair = tuple[Tensor, Tensor]
"""A [r, K] and B [M, r]."""
ALIGNMENT_BYTES = 16
KINDS = 5
"""Rows of the table: addresses of A and B, rank, first output of the projection, its outputs."""


@dataclass(frozen=True, eq=False)
class LowRankRows:
    """What each adapter adds to the projections of one product: pairs[adapter][projection]."""

    pairs: tuple[tuple[Pair | None, ...], ...]
    outputs: tuple[int, ...]
    """Of each projection; together they are the product's."""
    rank: int
    """The largest."""
    is_one_rank: bool
    table: Tensor
    """int64 [KINDS, adapters · projections]"""

    @classmethod
    def of(cls, pairs: Iterable[Sequence[Pair | None]], outputs: Sequence[int]) -> "LowRankRows":
        """Of matrices on one device and in one dtype; those that a kernel could not read in place are copied."""
        kept = tuple(tuple(None if pair is None else _aligned(pair) for pair in each) for each in pairs)
        starts = [sum(outputs[:index]) for index in range(len(outputs))]
        cells = [
            (0, 0, 0, start, size)
            if pair is None
            else (pair[0].data_ptr(), pair[1].data_ptr(), len(pair[0]), start, size)
            for each in kept
            for pair, start, size in zip(each, starts, outputs, strict=True)
        ]
        downs = [pair[0] for each in kept for pair in each if pair is not None]
        ranks = {len(down) for down in downs}
        table = torch.tensor(cells, dtype=torch.int64).T.contiguous().to(downs[0].device)
        return cls(kept, tuple(outputs), max(ranks), len(ranks) == 1, table)


def low_rank_rows(
    y: Tensor, x: Tensor, adapter_of: Tensor, matrices: LowRankRows, impl: Impl = "auto", *, overlap: bool = False
) -> None:
    """Add to y [N, M], in place, what the adapters `adapter_of` [N] (−1: none) make of the rows of x [N, K]."""
    if use_triton(impl, x) and y.dtype == x.dtype:
        _launch(y, x.contiguous(), adapter_of, matrices, overlap)
    else:
        every = range(len(matrices.pairs))
        low_rank_rows_eager(y, x, {a: (adapter_of == a).nonzero()[:, 0] for a in every}, matrices)


def low_rank_rows_eager(y: Tensor, x: Tensor, rows: Mapping[int, Tensor], matrices: LowRankRows) -> None:
    """The same with the indices of each adapter's rows: a product per adapter and projection."""
    for adapter, own in rows.items():
        inputs = x.index_select(0, own)
        for pair, outputs in zip(matrices.pairs[adapter], y.split(matrices.outputs, dim=1), strict=True):
            if pair is not None:
                outputs.index_add_(0, own, F.linear(F.linear(inputs, pair[0]), pair[1]).to(y.dtype))


def _aligned(pair: Pair) -> Pair:
    """The matrices, contiguous and where 16 bytes can be read at a time."""
    down, up = (
        part
        if part.is_contiguous() and part.data_ptr() % ALIGNMENT_BYTES == 0
        else part.clone(memory_format=torch.contiguous_format)
        for part in pair
    )
    return down, up


@triton.jit(do_not_specialize=["cells"])
def _down_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    low_ptr,
    adapter_ptr,
    table_ptr,
    cells,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    DTYPE: tl.constexpr,
    OVERLAP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_R numbers of A x for one row of x and one projection."""
    row, part, first = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BLOCK_R
    adapter = tl.load(adapter_ptr + row).to(tl.int32)
    cell = tl.maximum(adapter, 0) * PARTS + part
    rank = tl.where(adapter >= 0, tl.load(table_ptr + 2 * cells + cell), 0)
    down_ptr = address(table_ptr, cells, cell, 0, DTYPE)
    wait_for_previous(OVERLAP)
    if first < rank:
        r = first + tl.arange(0, BLOCK_R)
        total = tl.zeros((BLOCK_R, BLOCK_K), tl.float32)
        for k in range(0, K, BLOCK_K):
            at = k + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + row * K + at, mask=at < K, other=0).to(tl.float32)
            here = (r < rank)[:, None] & (at < K)[None, :]
            total += tl.load(down_ptr + r[:, None] * K + at[None, :], mask=here, other=0).to(tl.float32) * x[None, :]
        tl.store(low_ptr + (row * PARTS + part) * RANK + r, tl.sum(total, 1), mask=r < rank)
    launch_next(OVERLAP)


@triton.jit(do_not_specialize=["cells"])
def _up_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    low_ptr,
    adapter_ptr,
    table_ptr,
    cells,
    M: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    IS_ONE_RANK: tl.constexpr,
    DTYPE: tl.constexpr,
    OVERLAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """BLOCK_M outputs of one projection for one row: y += B (A x)."""
    row, part, first = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BLOCK_M
    adapter = tl.load(adapter_ptr + row).to(tl.int32)
    cell = tl.maximum(adapter, 0) * PARTS + part
    rank = tl.where(adapter >= 0, tl.load(table_ptr + 2 * cells + cell), 0)
    start, outputs = tl.load(table_ptr + 3 * cells + cell), tl.load(table_ptr + 4 * cells + cell)
    up_ptr = address(table_ptr, cells, cell, 1, DTYPE)
    m, r = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
    stride = RANK if IS_ONE_RANK else rank  # known ahead, several numbers are read at a time
    here = (m < outputs)[:, None] & (r < rank)[None, :]
    up = tl.load(up_ptr + m[:, None] * stride + r[None, :], mask=here, other=0).to(tl.float32)
    wait_for_previous(OVERLAP)
    if (rank > 0) & (first < outputs):
        low = tl.load(low_ptr + (row * PARTS + part) * RANK + r, mask=r < rank, other=0)
        y_rows = y_ptr + row * M + start + m
        y = tl.load(y_rows, mask=m < outputs, other=0).to(tl.float32)
        tl.store(y_rows, (y + tl.sum(up * low[None, :], 1)).to(y_ptr.dtype.element_ty), mask=m < outputs)
    launch_next(OVERLAP)


def _launch(y: Tensor, x: Tensor, adapter_of: Tensor, matrices: LowRankRows, overlap: bool = False) -> None:
    assert y.is_contiguous()
    rows, parts, rank = len(x), len(matrices.outputs), matrices.rank
    low = torch.empty((rows, parts, rank), device=x.device, dtype=torch.float32)
    block_r, block_k, block_m = (2, 16, 16) if is_interpreted() else (1, 4096, 128)
    shared = {"PARTS": parts, "RANK": rank, "DTYPE": TRITON_DTYPES[str(x.dtype)], "OVERLAP": overlap}
    tables = (low, adapter_of, matrices.table, matrices.table.shape[1])
    with on_device_of(x):
        _down_kernel[(rows, parts, triton.cdiv(rank, block_r))](
            x, *tables, K=x.shape[1], **shared, BLOCK_R=block_r, BLOCK_K=block_k, **pdl(overlap)
        )
        _up_kernel[(rows, parts, triton.cdiv(max(matrices.outputs), block_m))](
            y,
            *tables,
            M=y.shape[1],
            **shared,
            IS_ONE_RANK=matrices.is_one_rank,
            BLOCK_M=block_m,
            BLOCK_R=triton.next_power_of_2(rank),
            **pdl(overlap),
        )
