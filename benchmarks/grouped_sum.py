"""The sum of two grouped products in one: y[m] = a[m] · A[e] + b[m] · B[e] for the rows m of group e.

An alternative that routed_products.py times, not what training runs: a step and its memory were not measured with it.
It is the gradient of a gated MLP's input, through gate and up. As one product over twice the depth it writes
every row once and adds in float32: 0.72 ms for 65 536 rows and 64 experts of 2048 × 768 in bf16 on an H200, where two
grouped products (CUTLASS) take 0.86 ms and a further pass to add them up (benchmarks/routed_products.py).

Deep products are two of CUTLASS's after all, whose rate is higher (708 TFLOP/s) and whose two results are then small
beside the work: from DEEP on, by these rates.

A program computes one tile. Which group and rows a tile has depends on loads that only the device knows: a small kernel
writes it down first (`_tile_kernel`), for as many tiles as there can be.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tightfit.kernels.experts.grouped_matmul import HOPPER, grouped_matmul, grouped_matmul_eager, is_native
from tightfit.kernels.operators import on_device_of
from tightfit.kernels.triton_support import Impl, tl, triton, use_triton


class Tile(NamedTuple):
    """Rows, columns and depth of a program's product, its warps and the loads it has under way."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


LARGE = Tile(128, 256, 64, 8, 4)
"""For tensor cores of Hopper and later, 16 bits, and sizes that it divides: 571 TFLOP/s where SMALL's size has 416."""
SMALL = Tile(64, 128, 32, 4, 2)
INTERPRETED = Tile(16, 64, 32, 4, 1)
DEEP = 1536
"""Columns of an expert. What writing and adding two results takes, 0.13 ms each above, is gained back by then:
0.295 K/768 + 0.133 for each of two, 0.70 K/768 + 0.02 for one, are equal near K = 1700. Not measured beyond 768."""


def grouped_sum(a: Tensor, b: Tensor, a_weights: Tensor, b_weights: Tensor, offsets: Tensor, *, impl: Impl) -> Tensor:
    """a[m] · a_weights[e] + b[m] · b_weights[e], [M, N], for a, b [M, K] and weights [E, K, N]; offsets [E] int32."""
    if not use_triton(impl, a):
        total = grouped_matmul_eager(a, a_weights, offsets)
        return total.add_(grouped_matmul_eager(b, b_weights, offsets))
    return _run(a, b, a_weights, b_weights, offsets)


@triton.jit  # type: ignore[untyped-decorator]
def _tile_kernel(offsets_ptr, group_ptr, row_ptr, groups, GROUPS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of row tile number p its group and first row; group −1 behind the last."""
    tile = tl.program_id(0)
    each = tl.arange(0, GROUPS)
    ends = tl.load(offsets_ptr + each, mask=each < groups, other=0)
    starts = tl.load(offsets_ptr + each - 1, mask=(each > 0) & (each < groups), other=0)
    tiles = tl.where(each < groups, (ends - starts + ROWS - 1) // ROWS, 0)
    group = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(each < group, tiles, 0), 0)
    start = tl.sum(tl.where(each == group, starts, 0), 0)
    tl.store(group_ptr + tile, tl.where(group < groups, group, -1))
    tl.store(row_ptr + tile, start + (tile - before) * ROWS)


@triton.jit  # type: ignore[untyped-decorator]
def _added(  # type: ignore[no-untyped-def]
    total, x_at, weight_at, depth, columns, k, there, EVEN: tl.constexpr, DEPTH: tl.constexpr
):
    """`total` and one product: x_at [ROWS, DEPTH] and weight_at [DEPTH, COLUMNS] are of the first DEPTH."""
    for start in range(0, depth, DEPTH):
        if EVEN:
            x, weight = tl.load(x_at + start), tl.load(weight_at + start * columns)
        else:
            left = k < depth - start
            x = tl.load(x_at + start, mask=left[None, :], other=0.0)
            weight = tl.load(weight_at + start * columns, mask=left[:, None] & there[None, :], other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _sum_kernel(  # type: ignore[no-untyped-def]
    a_ptr,
    b_ptr,
    a_weights_ptr,
    b_weights_ptr,
    offsets_ptr,
    group_ptr,
    row_ptr,
    y_ptr,
    depth,
    columns,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    column_tiles = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0) // column_tiles
    group = tl.load(group_ptr + tile)
    if group < 0:
        return
    end = tl.load(offsets_ptr + group)
    rows = tl.load(row_ptr + tile) + tl.arange(0, ROWS)
    n = (tl.program_id(0) % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    there = n < columns
    x_at = tl.minimum(rows, end - 1).to(tl.int64)[:, None] * depth + k[None, :]  # rows behind the end are not stored
    weight_at = group.to(tl.int64) * columns * depth + k[:, None] * columns + n[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    total = _added(total, a_ptr + x_at, a_weights_ptr + weight_at, depth, columns, k, there, EVEN, DEPTH)
    total = _added(total, b_ptr + x_at, b_weights_ptr + weight_at, depth, columns, k, there, EVEN, DEPTH)
    y_at = y_ptr + rows.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=(rows < end)[:, None] & there[None, :])


def _tile(a: Tensor, columns: int) -> tuple[Tile, bool]:
    """What to compute at a time, and whether it divides depth and columns."""
    if not a.is_cuda:
        return INTERPRETED, False
    large = a.element_size() == 2 and torch.cuda.get_device_capability(a.device) >= HOPPER
    if large and a.shape[1] % LARGE.depth == 0 and columns % LARGE.columns == 0:
        return LARGE, True
    return SMALL, False


def tile_table(offsets: Tensor, rows: int, tile_rows: int) -> Tensor:
    """Group and first row of every tile of `tile_rows` of `rows` rows, [2, tiles]; of as many as there can be."""
    groups = len(offsets)
    table = offsets.new_empty(2, triton.cdiv(rows, tile_rows) + groups)
    _tile_kernel[(table.shape[1],)](
        offsets, *table, groups, GROUPS=triton.next_power_of_2(groups), ROWS=tile_rows, num_warps=1
    )
    return table


def _run(a: Tensor, b: Tensor, a_weights: Tensor, b_weights: Tensor, offsets: Tensor) -> Tensor:
    a, b, a_weights, b_weights = (each.contiguous() for each in (a, b, a_weights, b_weights))
    (count, depth), columns = a.shape, a_weights.shape[2]
    if depth > DEEP and is_native(a, a_weights):
        return grouped_matmul(a, a_weights, offsets).add_(grouped_matmul(b, b_weights, offsets))
    y = a.new_empty(count, columns)
    if not y.numel():
        return y
    tile, even = _tile(a, columns)
    with on_device_of(a):
        table = tile_table(offsets, count, tile.rows)
        _sum_kernel[(table.shape[1] * triton.cdiv(columns, tile.columns),)](
            a,
            b,
            a_weights,
            b_weights,
            offsets,
            *table,
            y,
            depth,
            columns,
            EVEN=even,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return y
