"""Quantization to fp8 with a scale per tensor, per row or per column (Micikevicius et al. 2022).

    q = round(x / scale), scale = max|x| / L        L = 448 for e4m3 (3 bits of mantissa), 57 344 for e5m2 (2 bits)

fp8 GEMMs contract over the last dimension of both operands, so the three products of a linear layer need x, its weight
and the gradient both plain and transposed. One kernel reads a tile once and writes either or both. A scale per tensor
needs a pass for the largest magnitude first, unless the kernel that wrote the tensor has found it (`amax`); a row fits
into registers, so a scale per row needs no extra pass.

Transposed copies are padded with zeros to rows of a multiple of 16, as the GEMMs need; zeros do not change sums over
tokens. Values cannot exceed L, except NaN and infinity, which become NaN.
"""

import torch
from torch import Tensor

from tightfit.kernels.operators import on_device_of, operator
from tightfit.kernels.triton_support import Impl, tl, triton, use_triton

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
TINIEST = 1e-30
"""Below this a largest magnitude counts as zero."""
ALIGNED = 16
AMAX_BLOCK = 8192
TILE_ROWS, TILE_COLUMNS = 128, 64
WIDEST_ROW = 32768


def quantize(
    x: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    plain: bool = True,
    transposed: bool = True,
    amax: Tensor | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K] as q [M, K], qᵀ [K, M up to 16] (empty where not asked for) and one float32 scale []."""
    return _quantize(x, amax, dtype, plain, transposed, impl)


def quantize_rows(x: Tensor, *, impl: Impl = "auto") -> tuple[Tensor, Tensor]:
    """x [M, K] as q [M, K] in e4m3 and the float32 scales [M, 1] of its rows."""
    return _quantize_rows(x, impl)


def quantize_columns(x: Tensor, *, impl: Impl = "auto") -> tuple[Tensor, Tensor]:
    """x [N, K] as qᵀ [K, N up to 16] in e4m3 and the float32 scales [K, 1] of its columns."""
    return _quantize_columns(x, impl)


def aligned(size: int) -> int:
    """The next multiple of 16."""
    return -(-size // ALIGNED) * ALIGNED


def _shapes(x: Tensor, dtype: torch.dtype, plain: bool, transposed: bool) -> tuple[Tensor, Tensor]:
    M, K = x.shape
    q = torch.empty(M, K, dtype=dtype, device=x.device) if plain else x.new_empty(0, dtype=dtype)
    if not transposed:
        return q, x.new_empty(0, dtype=dtype)
    return q, torch.empty(K, aligned(M), dtype=dtype, device=x.device)


def _fake(
    x: Tensor, amax: Tensor | None, dtype: torch.dtype, plain: bool, transposed: bool, impl: str
) -> tuple[Tensor, ...]:
    return *_shapes(x, dtype, plain, transposed), x.new_empty((), dtype=torch.float32)


def _fake_rows(x: Tensor, impl: str) -> tuple[Tensor, ...]:
    return _shapes(x, torch.float8_e4m3fn, True, False)[0], x.new_empty(x.shape[0], 1, dtype=torch.float32)


def _fake_columns(x: Tensor, impl: str) -> tuple[Tensor, ...]:
    return _shapes(x, torch.float8_e4m3fn, False, True)[1], x.new_empty(x.shape[1], 1, dtype=torch.float32)


def rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The reference: x / scale in an 8-bit format; scale broadcasts."""
    return (x.float() * (1 / scale)).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def _transposed(q: Tensor) -> Tensor:
    """Contiguous qᵀ with rows of a multiple of 16."""
    M, K = q.shape
    out = torch.zeros(K, aligned(M), dtype=torch.uint8, device=q.device)  # CPUs move 8-bit floats as bytes
    out[:, :M] = q.view(torch.uint8).t()
    return out.view(q.dtype)


def _run(
    x: Tensor, amax: Tensor | None, dtype: torch.dtype, plain: bool, transposed: bool, impl: Impl
) -> tuple[Tensor, ...]:
    if use_triton(impl, x):
        return _launch(x, amax, dtype, plain, transposed)
    amax = x.abs().amax() if amax is None else amax
    scale = amax.float().view(()).clamp(min=TINIEST) / LARGEST[dtype]
    q, none = rounded(x, scale, dtype), x.new_empty(0, dtype=dtype)
    return (q if plain else none), (_transposed(q) if transposed else none), scale


def _launch(
    x: Tensor, amax: Tensor | None, dtype: torch.dtype, plain: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    x = x if x.stride(-1) == 1 else x.contiguous()
    largest = _largest(x) if amax is None else amax
    if plain and transposed and _is_float32_on_gpu(x):
        q, _, scale = _cast(x, largest, dtype, True, False, by_column=False)
        return q, _cast(x, largest, dtype, False, True, by_column=False)[1], scale
    return _cast(x, largest, dtype, plain, transposed, by_column=False)


def _is_float32_on_gpu(x: Tensor) -> bool:
    """Triton 3.6 on an H200 miscompiles one kernel that writes a float32 tile both plain and transposed: one of the two
    is wrong. Each alone is right, and so are both of 16-bit tiles, which layers have."""
    return x.is_cuda and x.dtype == torch.float32


def _run_rows(x: Tensor, impl: Impl) -> tuple[Tensor, ...]:
    if use_triton(impl, x):
        return _launch_rows(x)
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=TINIEST) / LARGEST[torch.float8_e4m3fn]
    return rounded(x, scale, torch.float8_e4m3fn), scale


def _launch_rows(x: Tensor) -> tuple[Tensor, ...]:
    x = x if x.stride(-1) == 1 else x.contiguous()
    q, scale = _fake_rows(x, "triton")
    assert x.shape[1] <= WIDEST_ROW, f"rows of {x.shape[1]}"
    cols = triton.next_power_of_2(x.shape[1])
    with on_device_of(x):
        rows_kernel[(x.shape[0],)](
            x,
            q,
            scale,
            x.shape[1],
            x.stride(0),
            LARGEST=448.0,
            TINIEST=TINIEST,
            COLS=cols,
            num_warps=min(16, max(1, cols // 1024)),
        )
    return q, scale


def _run_columns(x: Tensor, impl: Impl) -> tuple[Tensor, ...]:
    if use_triton(impl, x):
        return _launch_columns(x)
    scale = x.abs().amax(0).float().clamp(min=TINIEST) / LARGEST[torch.float8_e4m3fn]
    return _transposed(rounded(x, scale, torch.float8_e4m3fn)), scale[:, None]


def _launch_columns(x: Tensor) -> tuple[Tensor, ...]:
    x = x if x.stride(-1) == 1 else x.contiguous()
    largest = torch.zeros(x.shape[1], dtype=torch.float32, device=x.device)
    with on_device_of(x):
        grid = (triton.cdiv(x.shape[0], TILE_ROWS), triton.cdiv(x.shape[1], TILE_COLUMNS))
        column_amax_kernel[grid](x, largest, *x.shape, x.stride(0), ROWS=TILE_ROWS, COLS=TILE_COLUMNS)
    _, transposed, scale = _cast(x, largest, torch.float8_e4m3fn, False, True, by_column=True)
    return transposed, scale


def _largest(x: Tensor) -> Tensor:
    """max|x| of contiguous or strided rows."""
    out = torch.zeros((), dtype=torch.float32, device=x.device)
    rows, width = (1, x.numel()) if x.is_contiguous() else x.shape
    with on_device_of(x):
        amax_kernel[(rows, triton.cdiv(width, AMAX_BLOCK))](x, out, width, x.stride(0), BLOCK=AMAX_BLOCK, num_warps=8)
    return out


def _cast(
    x: Tensor, largest: Tensor, dtype: torch.dtype, plain: bool, transposed: bool, *, by_column: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and scales, given the largest magnitude or one per column."""
    q, q_t = _shapes(x, dtype, plain, transposed)
    M, K = x.shape
    scale = torch.empty((K, 1) if by_column else (), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(aligned(M), TILE_ROWS), triton.cdiv(K, TILE_COLUMNS))
    with on_device_of(x):
        cast_kernel[grid](
            x,
            q,
            q_t,
            largest,
            scale,
            M,
            K,
            x.stride(0),
            aligned(M),
            LARGEST=LARGEST[dtype],
            TINIEST=TINIEST,
            PLAIN=plain,
            TRANSPOSED=transposed,
            BY_COLUMN=by_column,
            ROWS=TILE_ROWS,
            COLS=TILE_COLUMNS,
            num_warps=8,
        )
    return q, q_t, scale


@triton.jit
def amax_kernel(x_ptr, out_ptr, width, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Raise *out_ptr to a block's largest magnitude, atomically."""
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0).to(tl.int64) * stride + at, mask=at < width, other=0).to(tl.float32)
    tl.atomic_max(out_ptr, tl.max(tl.abs(x), 0))


@triton.jit
def column_amax_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, M, K, stride, ROWS: tl.constexpr, COLS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    x = tl.load(x_ptr + row * stride + col[None, :], mask=(row < M) & (col[None, :] < K), other=0).to(tl.float32)
    tl.atomic_max(out_ptr + col, tl.max(tl.abs(x), 0), mask=col < K)


@triton.jit
def rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, q_ptr, scale_ptr, width, stride, LARGEST: tl.constexpr, TINIEST: tl.constexpr, COLS: tl.constexpr
):
    """One row: its scale and its codes."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, COLS)
    x = tl.load(x_ptr + row * stride + col, mask=col < width, other=0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0), TINIEST) / LARGEST
    tl.store(scale_ptr + row, scale)
    q = tl.clamp(x * (1 / scale), -LARGEST, LARGEST)
    tl.store(q_ptr + row * width + col, q.to(q_ptr.dtype.element_ty), mask=col < width)


@triton.jit
def cast_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    q_ptr,
    q_t_ptr,
    largest_ptr,
    scale_ptr,
    M,
    K,
    stride,
    t_stride,
    LARGEST: tl.constexpr,
    TINIEST: tl.constexpr,
    PLAIN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """A tile, written plain and transposed; beyond the last row the transposed one has zeros."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1).to(tl.int64) * COLS + tl.arange(0, COLS)
    here = (row[:, None] < M) & (col[None, :] < K)
    x = tl.load(x_ptr + row[:, None] * stride + col[None, :], mask=here, other=0).to(tl.float32)
    if BY_COLUMN:
        scales = tl.maximum(tl.load(largest_ptr + col, mask=col < K, other=1.0), TINIEST) / LARGEST
        if tl.program_id(0) == 0:
            tl.store(scale_ptr + col, scales, mask=col < K)
        scale = scales[None, :]
    else:
        scale = tl.maximum(tl.load(largest_ptr), TINIEST) / LARGEST
        if tl.program_id(0) + tl.program_id(1) == 0:
            tl.store(scale_ptr, scale)
    q = tl.clamp(x * (1 / scale), -LARGEST, LARGEST).to(q_ptr.dtype.element_ty)
    if PLAIN:
        tl.store(q_ptr + row[:, None] * K + col[None, :], q, mask=here)
    if TRANSPOSED:
        there = (row[None, :] < t_stride) & (col[:, None] < K)
        tl.store(q_t_ptr + col[:, None] * t_stride + row[None, :], tl.trans(q), mask=there)


_quantize = operator(
    "fp8_quantize(Tensor x, Tensor? amax, ScalarType dtype, bool plain, bool transposed, str impl) "
    "-> (Tensor, Tensor, Tensor)",
    _run,
    _fake,
)
_quantize_rows = operator("fp8_quantize_rows(Tensor x, str impl) -> (Tensor, Tensor)", _run_rows, _fake_rows)
_quantize_columns = operator(
    "fp8_quantize_columns(Tensor x, str impl) -> (Tensor, Tensor)", _run_columns, _fake_columns
)
