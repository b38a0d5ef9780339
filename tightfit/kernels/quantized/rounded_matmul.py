"""Products with both factors in 8 bits, integers or floats: rows of x rounded in one pass, scales at the end.

    s_x[m] = max_k |x[m, k]| / L,   q = round(x · (1 / s_x)),   y[m, n] = s_x[m] · S[n] · Σ_k q[m, k] · w[n, k]

L is 127 for int8 and 448 for e4m3. Sums are 32-bit integers, exact in any order, or float32 (on Hopper those of tensor
cores for 8-bit floats, which keep 14 bits).

With few rows (decoding) time goes to reading the weight: it is the left factor, so that a block of tokens may be
narrow. Blocks are loaded by the tensor memory accelerator (TMA) where there is one, so far ahead that a program for 64
outputs on every second multiprocessor reads at most of the bandwidth: splitting the inputs among more programs gains
nothing then. With `overlap` (kernels/overlap.py) the first weights are prefetched while the kernel before ends.

With many rows time goes to arithmetic, at twice the rate of 16 bits: of floats by CUTLASS (kernels/fp8/fp8_matmul.py),
of integers in square tiles, ordered so that a few blocks of tokens run side by side and find each other's weights in
the L2 cache.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tightfit.kernels.decoding.few_rows import ALIGNMENT_BYTES, EARLY_BYTES, STAGED_BYTES, ask_early, blocks_of
from tightfit.kernels.fp8.fp8_matmul import fp8_matmul
from tightfit.kernels.mlp.glu import activated, factored
from tightfit.kernels.operators import multiprocessors, on_device_of, operator, shared_bytes
from tightfit.kernels.overlap import can_overlap, launch_next, pdl, wait_for_previous
from tightfit.kernels.triton_support import is_interpreted, tl, triton
from tightfit.models.spec import Activation

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
TINIEST = 1e-12
FEW_ROWS, FEW_ROWS_SHORT = 128, 256
"""Up to this many rows the weight is the left factor; for weights of at most SHORT outputs. Measured on an H200."""
SHORT = 8192
FP8_ALIGNMENT = 16
"""Sizes that CUTLASS takes are multiples of it."""
WIDEST_ROW = 32768
SPARED_BYTES, LEAST_STAGES = 2048, 3
"""Shared memory left to the compiler, and blocks that are loaded ahead at least before they are made smaller."""


class RoundedTile(NamedTuple):
    """Tokens, outputs and inputs of a block, pipeline stages, warps."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int = 4


SMALL = RoundedTile(block_m=16, block_n=16, block_k=32, stages=1)
"""For Triton's interpreter."""


@triton.jit
def round_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    q_ptr,
    scale_ptr,
    width,
    stride,
    IS_KNOWN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LARGEST: tl.constexpr,
    TINIEST: tl.constexpr,
    OVERLAP: tl.constexpr,
    COLS: tl.constexpr,
):
    """One row: its scale, unless one scale of all rows is known, and its codes, halves rounded to even.

    With ACTIVATION the row is gate and up, and act(g) · u is rounded, first to what x is in.
    """
    HALVES_TO_EVEN: tl.constexpr = 12582912.0  # 1.5 · 2²³: what is added to it loses its fraction
    launch_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, COLS)
    wait_for_previous(OVERLAP)
    x = tl.load(x_ptr + row * stride + col, mask=col < width, other=0).to(tl.float32)
    if ACTIVATION != "":
        up = tl.load(x_ptr + row * stride + width + col, mask=col < width, other=0).to(tl.float32)
        gate, _ = activated(x, ACTIVATION)
        factor, _ = factored(up, ACTIVATION)
        x = (gate * factor).to(x_ptr.dtype.element_ty).to(tl.float32)
    if IS_KNOWN:
        scale = tl.load(scale_ptr)
    else:
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 0), TINIEST), LARGEST)
        scale = tl.where(tl.max((x != x).to(tl.int32), 0) > 0, float("nan"), scale)
        tl.store(scale_ptr + row, scale)
    q = x * tl.div_rn(1.0, scale)
    if q_ptr.dtype.element_ty == tl.int8:
        q = tl.clamp(q, -LARGEST - 1.0, LARGEST)
        q = (q + HALVES_TO_EVEN) - HALVES_TO_EVEN
    else:
        q = tl.clamp(q, -LARGEST, LARGEST)
    tl.store(q_ptr + row * width + col, q.to(q_ptr.dtype.element_ty), mask=col < width)


@triton.jit(do_not_specialize=["M"])
def narrow_kernel(  # type: ignore[no-untyped-def]
    q_blocks,
    w_blocks,
    codes_ptr,
    row_scale_ptr,
    scale_ptr,
    y_ptr,
    M,
    N,
    row_scale_stride,
    scale_stride,
    K: tl.constexpr,
    SUMS: tl.constexpr,
    BY_TMA: tl.constexpr,
    ASKS_EARLY: tl.constexpr,
    OVERLAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BLOCK_N outputs of BLOCK_M tokens. `q_blocks` and `w_blocks` are TMA's descriptors, or pointers."""
    NOTHING: tl.constexpr = 0 if tl.int32 == SUMS else 0.0
    n_first, m_first = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_M
    n, m = n_first + tl.arange(0, BLOCK_N), m_first + tl.arange(0, BLOCK_M)
    in_n, in_m = n < N, m < M
    at_codes = codes_ptr + tl.where(in_n, n, 0).to(tl.int64) * K
    if ASKS_EARLY:
        ask_early(at_codes)
    wait_for_previous(OVERLAP)
    total = tl.zeros((BLOCK_N, BLOCK_M), SUMS)
    for k_first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if BY_TMA:
            codes, q = w_blocks.load([n_first, k_first]), q_blocks.load([m_first, k_first]).T
        else:
            k = k_first + tl.arange(0, BLOCK_K)
            at_q = q_blocks + tl.where(in_m, m, 0)[None, :] * K
            if K % BLOCK_K == 0:
                codes, q = tl.load(at_codes[:, None] + k[None, :]), tl.load(at_q + k[:, None])
            else:
                codes = tl.load(at_codes[:, None] + k[None, :], mask=(k < K)[None, :], other=NOTHING)
                q = tl.load(at_q + k[:, None], mask=(k < K)[:, None], other=NOTHING)
        total = tl.dot(codes, q, total, out_dtype=SUMS)
    launch_next(OVERLAP)
    row_scale = tl.load(row_scale_ptr + m * row_scale_stride, mask=in_m, other=0.0)
    scale = tl.load(scale_ptr + n * scale_stride, mask=in_n, other=0.0).to(tl.float32)
    y = total.to(tl.float32) * row_scale[None, :] * scale[:, None]
    here = in_m[None, :] & in_n[:, None]
    tl.store(y_ptr + m[None, :].to(tl.int64) * N + n[:, None], y.to(y_ptr.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["M"])
def square_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    codes_ptr,
    row_scale_ptr,
    scale_ptr,
    y_ptr,
    M,
    N,
    row_scale_stride,
    scale_stride,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile; programs are ordered so that TOGETHER blocks of tokens go through the outputs side by side."""
    across, down = tl.cdiv(N, BLOCK_N), tl.cdiv(M, BLOCK_M)
    first = tl.program_id(0) // (TOGETHER * across) * TOGETHER
    height = tl.minimum(down - first, TOGETHER)
    inside = tl.program_id(0) % (TOGETHER * across)
    m = (first + inside % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (inside // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    in_n, in_m = n < N, m < M
    at_q = q_ptr + tl.where(in_m, m, 0).to(tl.int64)[:, None] * K
    at_codes = codes_ptr + tl.where(in_n, n, 0).to(tl.int64)[None, :] * K
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for block in tl.range(0, (K + BLOCK_K - 1) // BLOCK_K, num_stages=STAGES):
        k = block * BLOCK_K + column
        if K % BLOCK_K == 0:
            q, codes = tl.load(at_q + k[None, :]), tl.load(at_codes + k[:, None])
        else:
            q = tl.load(at_q + k[None, :], mask=(k < K)[None, :], other=0)
            codes = tl.load(at_codes + k[:, None], mask=(k < K)[:, None], other=0)
        total = tl.dot(q, codes, total, out_dtype=tl.int32)
    row_scale = tl.load(row_scale_ptr + m * row_scale_stride, mask=in_m, other=0.0)
    scale = tl.load(scale_ptr + n * scale_stride, mask=in_n, other=0.0).to(tl.float32)
    y = total.to(tl.float32) * row_scale[:, None] * scale[None, :]
    here = in_m[:, None] & in_n[None, :]
    tl.store(y_ptr + m.to(tl.int64)[:, None] * N + n[None, :], y.to(y_ptr.dtype.element_ty), mask=here)


def narrow_tile(M: int, N: int, room: int) -> RoundedTile:
    """The tile for few rows, as measured for Llama's 8B on an H200 (docs/LOG.md): 64 outputs, unless these are many.

    Blocks are loaded as far ahead as there is `room` in shared memory.
    """
    block_m = min(max(triton.next_power_of_2(M), 16), 128)
    block_n = 128 if N > SHORT else 64
    staged = min(room - SPARED_BYTES, STAGED_BYTES)
    block_k = 256 if block_m < 128 and staged >= LEAST_STAGES * (block_n + block_m) * 256 else 128
    return RoundedTile(block_m, block_n, block_k, stages=max(2, min(8, staged // (block_n + block_m) // block_k)))


def square_tile(M: int, N: int, device: torch.device) -> RoundedTile:
    """The tile for many rows, large where that leaves enough programs."""
    are_few = triton.cdiv(M, 128) * triton.cdiv(N, 128) < multiprocessors(device)
    return RoundedTile(64 if are_few else 128, 128, 128, stages=4 if are_few else 3)


def round_rows(
    x: Tensor,
    kind: torch.dtype,
    known_scale: Tensor | None = None,
    activation: Activation | Literal[""] = "",
    *,
    overlap: bool = False,
) -> tuple[Tensor, Tensor]:
    """x [M, K] as codes of `kind` and the float32 scales [M, 1] of its rows, or `known_scale` [1] of all rows.

    With `activation` x is gate beside up [M, 2K], and act(g) · u is rounded.
    """
    M, K = x.shape[0], x.shape[1] // (2 if activation else 1)
    assert K <= WIDEST_ROW, f"rows of {K}"
    q = torch.empty(M, K, device=x.device, dtype=kind)
    if known_scale is None:
        scale = torch.empty(M, 1, device=x.device, dtype=torch.float32)
    else:
        scale = known_scale.to(torch.float32)
    cols = triton.next_power_of_2(K)
    with on_device_of(x):
        round_rows_kernel[(M,)](
            x,
            q,
            scale,
            K,
            x.stride(0),
            IS_KNOWN=known_scale is not None,
            ACTIVATION=activation,
            LARGEST=LARGEST[kind],
            TINIEST=TINIEST,
            OVERLAP=overlap,
            COLS=cols,
            num_warps=min(16, max(1, cols // 1024)),
            **pdl(overlap),
        )
    return q, scale


def multiply_codes(
    q: Tensor, codes: Tensor, row_scale: Tensor, scale: Tensor, dtype: torch.dtype, *, overlap: bool = False
) -> Tensor:
    """q [M, K] and codes [N, K] of one kind with row_scale [M, 1] or [1] and scale [N, 1], as y [M, N]."""
    (M, K), N = q.shape, codes.shape[0]
    if (FEW_ROWS if N > SHORT else FEW_ROWS_SHORT) < M:
        if codes.dtype == torch.int8:
            return _square(q, codes, row_scale, scale, dtype)
        if K % FP8_ALIGNMENT == N % FP8_ALIGNMENT == 0 and dtype == torch.bfloat16:
            return fp8_matmul(q, codes, row_scale.expand(M, 1).contiguous(), scale, dtype)
    return multiply_few(q, codes, row_scale, scale, dtype, overlap=overlap)


def multiply_few(
    q: Tensor,
    codes: Tensor,
    row_scale: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    tile: RoundedTile | None = None,
    *,
    overlap: bool = False,
) -> Tensor:
    """`multiply_codes` with the weight as the left factor, in tiles of a size."""
    (M, K), N = q.shape, codes.shape[0]
    chosen = tile or (SMALL if is_interpreted() else narrow_tile(M, N, shared_bytes(q.device)))
    by_tma = _has_tma(q, codes)
    y = torch.empty(M, N, device=q.device, dtype=dtype)
    with on_device_of(q):
        narrow_kernel[(triton.cdiv(N, chosen.block_n), triton.cdiv(M, chosen.block_m))](
            blocks_of(q, chosen.block_m, chosen.block_k) if by_tma else q,
            blocks_of(codes, chosen.block_n, chosen.block_k) if by_tma else codes,
            codes,
            row_scale,
            scale,
            y,
            M,
            N,
            1 if row_scale.ndim == 2 else 0,
            scale.stride(0),
            K=K,
            SUMS=tl.int32 if codes.dtype == torch.int8 else tl.float32,
            BY_TMA=by_tma,
            ASKS_EARLY=overlap and by_tma and K >= EARLY_BYTES,
            OVERLAP=overlap,
            BLOCK_M=chosen.block_m,
            BLOCK_N=chosen.block_n,
            BLOCK_K=chosen.block_k,
            STAGES=chosen.stages,
            num_warps=chosen.warps,
            **pdl(overlap),
        )
    return y


def _square(q: Tensor, codes: Tensor, row_scale: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`multiply_codes` of many rows of integers."""
    (M, K), N = q.shape, codes.shape[0]
    tile = SMALL if is_interpreted() else square_tile(M, N, q.device)
    y = torch.empty(M, N, device=q.device, dtype=dtype)
    with on_device_of(q):
        square_kernel[(triton.cdiv(M, tile.block_m) * triton.cdiv(N, tile.block_n),)](
            q,
            codes,
            row_scale,
            scale,
            y,
            M,
            N,
            1 if row_scale.ndim == 2 else 0,
            scale.stride(0),
            K=K,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            TOGETHER=8,
            STAGES=tile.stages,
            num_warps=tile.warps,
        )
    return y


def _has_tma(q: Tensor, codes: Tensor) -> bool:
    """Whether blocks of both can be loaded by TMA: Hopper or later, rows on boundaries of 16 bytes."""
    aligned = not (q.data_ptr() | codes.data_ptr() | q.shape[1]) % ALIGNMENT_BYTES
    return aligned and (not q.is_cuda or can_overlap(q.device))


def _run(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    input_scale: Tensor | None,
    activation: Activation | Literal[""],
    overlap: bool,
) -> Tensor:
    q, row_scale = round_rows(x, codes.dtype, input_scale, activation, overlap=overlap)
    return multiply_codes(q, codes, row_scale, scale, x.dtype, overlap=overlap)


rounded_matmul = operator(
    "rounded_matmul(Tensor x, Tensor codes, Tensor scale, Tensor? input_scale, str activation, bool overlap) -> Tensor",
    _run,
    lambda x, codes, scale, input_scale, activation, overlap: x.new_empty(x.shape[0], codes.shape[0]),
)
"""x [M, K] times the transpose of 8-bit codes [N, K] with scale [N, 1]; x is rounded per row or by `input_scale`, after
an activation of gate beside up where there is one."""
