"""Products of 8-bit integers in Triton: rows of x rounded in one pass, sums in 32-bit integers, scales at the end.

    s_x[m] = max_k |x[m, k]| / 127,   q = round(x · (1 / s_x)),   y[m, n] = s_x[m] · S[n] · Σ_k q[m, k] · w[n, k]

With few rows (decoding) time goes to reading the weight: it is the left factor, so that a block of tokens may be
narrow, and where outputs alone give too few programs to keep the card busy, several split the inputs (split-K); the
last one to finish adds up their partial sums. With many rows time goes to arithmetic, at twice the rate of 16 bits:
square tiles, ordered so that a few blocks of tokens run side by side and find each other's weights in the L2 cache.
Sums of integers are exact in any order.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tightfit.kernels.operators import finish_counters, multiprocessors, on_device_of, operator
from tightfit.kernels.triton_support import is_interpreted, tl, triton

LARGEST = 127
TINIEST = 1e-12
FEW_ROWS = 128
"""Up to this many the weight is the left factor: measured on an H200."""
WIDEST_ROW = 32768
NEEDED = (8, 0)
"""Compute capability from which Triton multiplies 8-bit integers on tensor cores."""


class Int8Tile(NamedTuple):
    """Tokens, outputs and inputs of a block, programs that split the inputs, pipeline stages, warps."""

    block_m: int
    block_n: int
    block_k: int
    split: int
    stages: int
    warps: int


@triton.jit
def round_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    q_ptr,
    scale_ptr,
    width,
    stride,
    IS_KNOWN: tl.constexpr,
    LARGEST: tl.constexpr,
    TINIEST: tl.constexpr,
    COLS: tl.constexpr,
):
    """One row: its scale, unless one scale of all rows is known, and its codes, halves rounded to even."""
    HALVES_TO_EVEN: tl.constexpr = 12582912.0  # 1.5 · 2²³: what is added to it loses its fraction
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, COLS)
    x = tl.load(x_ptr + row * stride + col, mask=col < width, other=0).to(tl.float32)
    if IS_KNOWN:
        scale = tl.load(scale_ptr)
    else:
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 0), TINIEST), LARGEST * 1.0)
        scale = tl.where(tl.max((x != x).to(tl.int32), 0) > 0, float("nan"), scale)
        tl.store(scale_ptr + row, scale)
    q = tl.clamp(x * tl.div_rn(1.0, scale), -LARGEST - 1.0, LARGEST * 1.0)
    q = (q + HALVES_TO_EVEN) - HALVES_TO_EVEN
    tl.store(q_ptr + row * width + col, q.to(tl.int8), mask=col < width)


@triton.jit(do_not_specialize=["M", "split"])
def few_rows_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    codes_ptr,
    row_scale_ptr,
    scale_ptr,
    y_ptr,
    partial_ptr,
    counter_ptr,
    M,
    N,
    split,
    row_scale_stride,
    scale_stride,
    K: tl.constexpr,
    IS_SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BLOCK_N outputs of BLOCK_M tokens over one of `split` parts of the inputs."""
    share, m_block = tl.program_id(1), tl.program_id(2)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_K)
    in_n, in_m = n < N, m < M
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    first, last = BLOCKS * share // split, BLOCKS * (share + 1) // split
    at_codes = codes_ptr + tl.where(in_n, n, 0).to(tl.int64)[:, None] * K
    at_q = q_ptr + tl.where(in_m, m, 0)[None, :] * K
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
    for block in tl.range(first, last, num_stages=STAGES):
        k = block * BLOCK_K + column
        if K % BLOCK_K == 0:
            codes, q = tl.load(at_codes + k[None, :]), tl.load(at_q + k[:, None])
        else:
            codes = tl.load(at_codes + k[None, :], mask=(k < K)[None, :], other=0)
            q = tl.load(at_q + k[:, None], mask=(k < K)[:, None], other=0)
        total = tl.dot(codes, q, total, out_dtype=tl.int32)
    here = in_m[None, :] & in_n[:, None]
    out = m[None, :] * N + n[:, None]
    if IS_SHARED:
        tl.store(partial_ptr + share * M * N + out, total, mask=here)
        tl.debug_barrier()  # all of this program's sums are written before the counter rises
        counter = counter_ptr + m_block * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") < split - 1:
            return
        tl.store(counter, 0)
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
        for other in range(split):
            total += tl.load(partial_ptr + other * M * N + out, mask=here, other=0, cache_modifier=".cg")
    row_scale = tl.load(row_scale_ptr + m * row_scale_stride, mask=in_m, other=0.0)
    scale = tl.load(scale_ptr + n * scale_stride, mask=in_n, other=0.0).to(tl.float32)
    y = total.to(tl.float32) * row_scale[None, :] * scale[:, None]
    tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["M"])
def many_rows_kernel(  # type: ignore[no-untyped-def]
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


def tile_for(M: int, N: int, K: int, device: torch.device) -> Int8Tile:
    """The tile that gives every multiprocessor programs, as measured for Llama's 8B on an H200 (docs/LOG.md)."""
    if is_interpreted():
        return Int8Tile(block_m=16, block_n=16, block_k=32, split=2 if M <= FEW_ROWS else 1, stages=1, warps=4)
    if M > FEW_ROWS:
        are_few = triton.cdiv(M, 128) * triton.cdiv(N, 128) < multiprocessors(device)
        return Int8Tile(64 if are_few else 128, 128, 128, split=1, stages=4 if are_few else 3, warps=4)
    block_m = min(max(triton.next_power_of_2(M), 16), 128)
    split = max(1, min(2 * multiprocessors(device) // triton.cdiv(N, 64), K // 1024, 4 if M <= 16 else 2))
    return Int8Tile(block_m, block_n=64, block_k=256 if split > 1 or M <= 64 else 128, split=split, stages=4, warps=4)


def round_rows(x: Tensor, known_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [M, K] as int8 codes and the float32 scales [M, 1] of its rows, or `known_scale` [1] of all rows."""
    M, K = x.shape
    assert K <= WIDEST_ROW, f"rows of {K}"
    q = torch.empty(M, K, device=x.device, dtype=torch.int8)
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
            LARGEST=LARGEST,
            TINIEST=TINIEST,
            COLS=cols,
            num_warps=min(16, max(1, cols // 1024)),
        )
    return q, scale


def multiply_codes(
    q: Tensor, codes: Tensor, row_scale: Tensor, scale: Tensor, dtype: torch.dtype, tile: Int8Tile | None = None
) -> Tensor:
    """q [M, K] and codes [N, K] in int8 with row_scale [M, 1] or [1] and scale [N, 1], as y [M, N]."""
    (M, K), N = q.shape, codes.shape[0]
    chosen = tile or tile_for(M, N, K, q.device)
    y = torch.empty(M, N, device=q.device, dtype=dtype)
    strides = (1 if row_scale.ndim == 2 else 0), scale.stride(0)
    with on_device_of(q):
        if M > FEW_ROWS:
            many_rows_kernel[(triton.cdiv(M, chosen.block_m) * triton.cdiv(N, chosen.block_n),)](
                q,
                codes,
                row_scale,
                scale,
                y,
                M,
                N,
                *strides,
                K=K,
                BLOCK_M=chosen.block_m,
                BLOCK_N=chosen.block_n,
                BLOCK_K=chosen.block_k,
                TOGETHER=8,
                STAGES=chosen.stages,
                num_warps=chosen.warps,
            )
            return y
        partial = torch.empty(chosen.split * M * N, device=q.device, dtype=torch.int32) if chosen.split > 1 else y
        few_rows_kernel[(triton.cdiv(N, chosen.block_n), chosen.split, triton.cdiv(M, chosen.block_m))](
            q,
            codes,
            row_scale,
            scale,
            y,
            partial,
            finish_counters(q.device),
            M,
            N,
            chosen.split,
            *strides,
            K=K,
            IS_SHARED=chosen.split > 1,
            BLOCK_M=chosen.block_m,
            BLOCK_N=chosen.block_n,
            BLOCK_K=chosen.block_k,
            STAGES=chosen.stages,
            num_warps=chosen.warps,
        )
    return y


def _run(x: Tensor, codes: Tensor, scale: Tensor, input_scale: Tensor | None) -> Tensor:
    q, row_scale = round_rows(x, input_scale)
    return multiply_codes(q, codes, row_scale, scale, x.dtype)


int8_matmul = operator(
    "int8_matmul(Tensor x, Tensor codes, Tensor scale, Tensor? input_scale) -> Tensor",
    _run,
    lambda x, codes, scale, input_scale: x.new_empty(x.shape[0], codes.shape[0]),
)
"""x [M, K] times the transpose of int8 codes [N, K] with scale [N, 1]; x is rounded per row or by `input_scale` [1]."""
