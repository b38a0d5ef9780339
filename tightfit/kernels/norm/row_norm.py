"""The kernels behind `rms_norm` and `layer_norm`, which differ in whether a row is centred first.

With s = x + residual (the residual is optional), w = weight + offset and means over the last dimension:

    x̂ = (s − μ) · r        μ = mean(s) if centred, else 0        r = 1 / √(mean((s − μ)²) + ε)
    y = x̂ · w + bias
    dx = r · (g − x̂ · mean(g · x̂) − mean(g) if centred) + ds        with g = dy · w;  also the residual's gradient
    dweight = Σ_rows dy · x̂        dbias = Σ_rows dy

These operations are bound by memory, so forward reads and writes each tensor once and backward reads dy, s (and ds)
once and writes dx once. Saved for backward: s, and r (and μ) per row.

The sums over rows need no atomics: a few programs per multiprocessor loop over all rows, keep their own float32 sums in
registers and write them once; a second small kernel adds them in a fixed order, so results are deterministic.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tightfit.kernels.operators import (
    as_rows,
    below_autograd,
    empty_like,
    multiprocessors,
    on_device_of,
    operator,
    shared_bytes,
)
from tightfit.kernels.overlap import launch_next, pdl, wait_for_previous
from tightfit.kernels.triton_support import tl, triton

WIDEST = 65_536
"""The widest row a program holds in registers (spilling from 16 k on); wider ones use plain torch."""


class Tiles(NamedTuple):
    """Rows and columns of a tile, warps, programs, and pipeline stages (tiles a program loads ahead)."""

    rows: int
    cols: int
    warps: int
    programs: int
    stages: int


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    stats_ptr,
    rows,
    width,
    x_stride,
    residual_stride,
    eps,
    offset,
    CENTRED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    launch_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    in_row = col < width
    here = in_row & (row < rows)
    if OVERLAP:
        weight = tl.load(weight_ptr + col, mask=in_row, other=0)
    wait_for_previous(OVERLAP)
    s = tl.load(x_ptr + row * x_stride + col, mask=here, other=0).to(tl.float32)
    if HAS_RESIDUAL:
        s += tl.load(residual_ptr + row * residual_stride + col, mask=here, other=0).to(tl.float32)
        rounded = s.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * width + col, rounded, mask=here)
        s = rounded.to(tl.float32)  # what the backward pass will read, and what adding first would have normed
    if CENTRED:
        mean = tl.sum(s, 1, keep_dims=True) / width
        s = tl.where(here, s - mean, 0.0)
        tl.store(stats_ptr + rows + row, mean, mask=row < rows)
    rstd = tl.rsqrt(tl.sum(s * s, 1, keep_dims=True) / width + eps)
    tl.store(stats_ptr + row, rstd, mask=row < rows)
    if not OVERLAP:  # otherwise registers would hold it all along
        weight = tl.load(weight_ptr + col, mask=in_row, other=0)
    y = s * rstd * (weight.to(tl.float32) + offset)
    if HAS_BIAS:
        y += tl.load(bias_ptr + col, mask=in_row, other=0).to(tl.float32)
    tl.store(y_ptr + row * width + col, y.to(y_ptr.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(  # type: ignore[no-untyped-def]
    dy_ptr,
    ds_ptr,
    s_ptr,
    weight_ptr,
    stats_ptr,
    dx_ptr,
    sums_ptr,
    rows,
    width,
    dy_stride,
    ds_stride,
    s_stride,
    offset,
    CENTRED: tl.constexpr,
    HAS_DS: tl.constexpr,
    WEIGHT_GRADIENT: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
):
    col = tl.arange(0, COLS)[None, :]
    in_row = col < width
    weight = tl.load(weight_ptr + col, mask=in_row, other=0).to(tl.float32) + offset
    d_weight = tl.zeros((ROWS, COLS), tl.float32)
    d_bias = tl.zeros((ROWS, COLS), tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (block * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        here = in_row & (row < rows)
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=here, other=0).to(tl.float32)
        s = tl.load(s_ptr + row * s_stride + col, mask=here, other=0).to(tl.float32)
        rstd = tl.load(stats_ptr + row, mask=row < rows, other=0)
        g = dy * weight
        if CENTRED:
            x_hat = (s - tl.load(stats_ptr + rows + row, mask=row < rows, other=0)) * rstd
            dx = g - tl.sum(g, 1, keep_dims=True) / width
        else:
            x_hat = s * rstd
            dx = g
        dx = rstd * (dx - x_hat * (tl.sum(g * x_hat, 1, keep_dims=True) / width))
        if HAS_DS:
            dx += tl.load(ds_ptr + row * ds_stride + col, mask=here, other=0).to(tl.float32)
        tl.store(dx_ptr + row * width + col, dx.to(dx_ptr.dtype.element_ty), mask=here)
        if WEIGHT_GRADIENT:
            d_weight += dy * x_hat
        if BIAS_GRADIENT:
            d_bias += dy
    mine = sums_ptr + tl.program_id(0) * width + col
    if WEIGHT_GRADIENT:
        tl.store(mine, tl.sum(d_weight, 0, keep_dims=True), mask=in_row)
    if BIAS_GRADIENT:
        tl.store(mine + tl.num_programs(0) * width, tl.sum(d_bias, 0, keep_dims=True), mask=in_row)


@triton.jit
def _add_sums_kernel(  # type: ignore[no-untyped-def]
    sums_ptr, out_ptr, programs, width, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """out[which, col] = Σ_program sums[which, program, col]."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]
    which = tl.program_id(1)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        here = (row < programs) & (col < width)
        total += tl.load(sums_ptr + (which * programs + row) * width + col, mask=here, other=0)
    total = tl.sum(total, 0, keep_dims=True)
    tl.store(out_ptr + which * width + col, total.to(out_ptr.dtype.element_ty), mask=col < width)


@lru_cache(maxsize=1024)
def _forward_tiles(rows: int, width: int) -> Tiles:
    """A program per tile of 2048 elements or one row, 32 elements per thread: enough loads in flight by themselves.

    H200, 16384×4096 bf16: 94.6 % of copy bandwidth; 16 per thread 91 %; programs that walk over rows at most 91 %.
    """
    cols = _power_of_2(width)
    per_tile = max(1, 2048 // cols)
    return Tiles(per_tile, cols, _warps(per_tile * cols, 32), -(-rows // per_tile), 1)


@lru_cache(maxsize=1024)
def _backward_tiles(rows: int, width: int, element_bytes: int, tensors: int, device: torch.device) -> Tiles:
    """Few programs, each with the next tiles of its `tensors` tensors loading while it works on one.

    Wide rows, H200 at 16384×4096 bf16: tiles of 16 KiB, one program per multiprocessor, three in the pipeline reach
    94.0 % of copy bandwidth, the second kernel included (half the tile 90.7 %, two programs 90.2 %); with ds to read as
    well, half the tile and two programs 96.2 %. Narrow rows, 524288×128: tiles of 4 KiB on eight warps, two programs,
    four in the pipeline 92.8 % (wide tiles 89.8 %).
    """
    cols = _power_of_2(width)
    narrow = cols <= 512
    tile_bytes = 4096 if narrow else 8192 if tensors > 2 else 16384
    per_tile = max(1, tile_bytes // (cols * element_bytes))
    room = _shared_bytes(device) // (tensors * per_tile * cols * element_bytes)
    stages = max(1, min(4 if narrow else 3, 1 + room))
    programs = 4 if stages == 1 else 2 if narrow or per_tile * cols <= 4096 else 1
    programs = min(-(-rows // per_tile), programs * multiprocessors(device))
    return Tiles(per_tile, cols, _warps(per_tile * cols, 8 if narrow else 32), programs, stages)


def _warps(elements: int, per_thread: int) -> int:
    return min(max(1, elements // (32 * per_thread)), 32)


def _power_of_2(size: int) -> int:
    """The next one; Triton's own function costs ten times as much to call."""
    return 1 << (size - 1).bit_length()


def _shared_bytes(device: torch.device) -> int:
    """Shared memory for tiles that load ahead, less the reductions' own; none before asynchronous copies (Ampere)."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 8:
        return 0
    return shared_bytes(device) - 8192


def _forward_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    offset: float,
    centred: bool,
    overlap: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, s = x + residual (empty without one), and what is kept per row: r, then μ where centred."""
    stats = x.new_empty((2 if centred else 1, x.numel() // x.shape[-1]), dtype=torch.float32)
    if residual is None:
        return empty_like(x), x.new_empty(0), stats
    dtype = torch.promote_types(x.dtype, residual.dtype)
    return empty_like(x, dtype), empty_like(x, dtype), stats


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    offset: float,
    centred: bool,
    overlap: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    y, s, stats = _forward_fake(x, weight, bias, residual, eps, offset, centred, overlap)
    if not y.numel():
        return y, s, stats
    x, extra = as_rows(x), None if residual is None else as_rows(residual)
    rows, width = x.shape
    tiles = _forward_tiles(rows, width)
    with on_device_of(x):
        _forward_kernel[(tiles.programs,)](
            x,
            extra,
            weight,
            bias,
            y,
            s,
            stats,
            rows,
            width,
            x.stride(0),
            0 if extra is None else extra.stride(0),
            eps,
            offset,
            CENTRED=centred,
            HAS_RESIDUAL=extra is not None,
            HAS_BIAS=bias is not None,
            OVERLAP=overlap,
            ROWS=tiles.rows,
            COLS=tiles.cols,
            num_warps=tiles.warps,
            **pdl(overlap),
        )
    return y, s, stats


def _backward_fake(
    dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor, stats: Tensor, offset: float, sums: int
) -> tuple[Tensor, Tensor]:
    return empty_like(s), weight.new_empty((sums, s.shape[-1]))


def _backward(
    dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor, stats: Tensor, offset: float, sums: int
) -> tuple[Tensor, Tensor]:
    """dx, and the gradients of weight and bias as one tensor: none, the first, or both, as `sums` is 0, 1 or 2."""
    dx, d_affine = _backward_fake(dy, ds, s, weight, stats, offset, sums)
    if not dx.numel():
        return dx, d_affine.zero_()
    dy, s, ds = as_rows(dy), as_rows(s), None if ds is None else as_rows(ds)
    rows, width = s.shape
    tiles = _backward_tiles(rows, width, s.element_size(), 2 if ds is None else 3, s.device)
    partial = s.new_empty((sums, tiles.programs, width), dtype=torch.float32)
    with on_device_of(s):
        _backward_kernel[(tiles.programs,)](
            dy,
            ds,
            s,
            weight,
            stats,
            dx,
            partial,
            rows,
            width,
            dy.stride(0),
            0 if ds is None else ds.stride(0),
            s.stride(0),
            offset,
            CENTRED=len(stats) == 2,
            HAS_DS=ds is not None,
            WEIGHT_GRADIENT=sums > 0,
            BIAS_GRADIENT=sums > 1,
            ROWS=tiles.rows,
            COLS=tiles.cols,
            STAGES=tiles.stages,
            num_warps=tiles.warps,
        )
        if sums:
            _add_sums_kernel[(-(-width // 32), sums)](
                partial, d_affine, tiles.programs, width, ROWS=64, COLS=32, num_warps=8
            )
    return dx, d_affine


class _RowNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        eps: float,
        offset: float,
        centred: bool,
        overlap: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        with below_autograd():
            y, s, stats = row_norm(x, weight, bias, residual, eps, offset, centred, overlap)
        ctx.save_for_backward(x if residual is None else s, weight, stats)
        ctx.offset, ctx.dtypes = offset, (x.dtype, None if residual is None else residual.dtype)
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        return y, s, stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, ds: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        s, weight, stats = ctx.saved_tensors
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        x_dtype, residual_dtype = ctx.dtypes
        ds = None if residual_dtype is None else ds
        d_weight = d_bias = None
        if dy is None:
            dx = ds
        else:
            sums = 2 if needs_bias else int(needs_weight)
            dx, d_affine = _row_norm_backward(dy, ds, s, weight, stats, ctx.offset, sums)
            d_weight = d_affine[0] if needs_weight else None
            d_bias = d_affine[1] if needs_bias else None
        d_residual = None if dx is None or residual_dtype is None else dx.to(residual_dtype)
        return None if dx is None else dx.to(x_dtype), d_weight, d_bias, d_residual, None, None, None, None


_row_norm_backward = operator(
    "row_norm_backward(Tensor dy, Tensor? ds, Tensor s, Tensor weight, Tensor stats, float offset, int sums)"
    " -> (Tensor, Tensor)",
    _backward,
    _backward_fake,
)
row_norm = operator(
    "row_norm(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, float eps, float offset, bool centred,"
    " bool overlap) -> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    _RowNorm,
)
