"""x · Wᵀ for a weight of 8-bit floats with a scale per row and up to 128 tokens: the weight is read once, in 8 bits.

    y[m, n] = S[n] · Σ_k x[m, k] · W[n, k]

A program reads a block of codes, converts them to 16-bit floats in registers (which hold e4m3 exactly) and multiplies
on tensor cores, the weight as the left factor. Where outputs alone give too few programs to keep the card busy, several
split the inputs (split-K); the last one to finish adds up their partial sums. For one token fp8_vector.py reads
faster; from a few hundred tokens on arithmetic costs more than reading: the weight is expanded to 16 bits once and
multiplied by cuBLAS. Not differentiable.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tightfit.kernels.operators import finish_counters, multiprocessors, on_device_of
from tightfit.kernels.triton_support import is_interpreted, tl, triton

MOST_ROWS = 128
"""Above it, expanding the weight and cuBLAS take less: measured on an H200 (docs/LOG.md)."""


class Fp8Tile(NamedTuple):
    """Tokens, outputs and inputs of a block, programs that split the inputs, pipeline stages, warps."""

    block_m: int
    block_n: int
    block_k: int
    split: int
    stages: int
    warps: int


@triton.jit(do_not_specialize=["M", "split"])
def fp8_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    codes_ptr,
    scale_ptr,
    y_ptr,
    partial_ptr,
    counter_ptr,
    M,
    N,
    split,
    K: tl.constexpr,
    IS_SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BLOCK_N outputs of BLOCK_M tokens over one of `split` parts of the inputs."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    share, m_block = tl.program_id(1), tl.program_id(2)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_K)
    in_n, in_m = n < N, m < M
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    first, last = BLOCKS * share // split, BLOCKS * (share + 1) // split
    at_codes = codes_ptr + tl.where(in_n, n, 0).to(tl.int64)[:, None] * K
    at_x = x_ptr + tl.where(in_m, m, 0)[None, :] * K
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        k = block * BLOCK_K + column
        if K % BLOCK_K == 0:
            codes, x = tl.load(at_codes + k[None, :]), tl.load(at_x + k[:, None])
        else:
            codes = tl.load(at_codes + k[None, :], mask=(k < K)[None, :], other=0.0)
            x = tl.load(at_x + k[:, None], mask=(k < K)[:, None], other=0.0)
        total = tl.dot(codes.to(DTYPE), x, total)
    total *= tl.load(scale_ptr + n, mask=in_n, other=0.0)[:, None]
    here = in_m[None, :] & in_n[:, None]
    out = m[None, :] * N + n[:, None]
    if IS_SHARED:
        tl.store(partial_ptr + share * M * N + out, total, mask=here)
        tl.debug_barrier()  # all of this program's sums are written before the counter rises
        counter = counter_ptr + m_block * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") < split - 1:
            return
        tl.store(counter, 0)
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for other in range(split):
            total += tl.load(partial_ptr + other * M * N + out, mask=here, other=0.0, cache_modifier=".cg")
    tl.store(y_ptr + out, total.to(DTYPE), mask=here)


@triton.jit
def expand_fp8_kernel(codes_ptr, scale_ptr, weight_ptr, K, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of one row: codes times the row's scale."""
    row = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(codes_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32) * tl.load(scale_ptr + row)
    tl.store(weight_ptr + row * K + k, value.to(weight_ptr.dtype.element_ty), mask=k < K)


def expand_fp8(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix [N, K] of e4m3 codes and a scale per row, dequantized."""
    N, K = codes.shape
    weight = torch.empty(N, K, device=codes.device, dtype=dtype)
    block = 32 if is_interpreted() else 2048
    with on_device_of(codes):
        expand_fp8_kernel[(triton.cdiv(K, block), N)](codes, scale, weight, K, BLOCK=block, num_warps=4)
    return weight


def fp8_tile_for(M: int, N: int, K: int, device: torch.device) -> Fp8Tile:
    """The tile that gives every multiprocessor programs, as measured for Llama's 8B on an H200 (docs/LOG.md)."""
    if is_interpreted():
        return Fp8Tile(block_m=16, block_n=16, block_k=32, split=2, stages=1, warps=4)
    block_m = min(max(triton.next_power_of_2(M), 16), 128)
    programs = triton.cdiv(N, 64) * triton.cdiv(M, block_m)
    split = max(1, min(3 * multiprocessors(device) // programs, K // 1024, 4))
    return Fp8Tile(block_m=block_m, block_n=64, block_k=128, split=split, stages=4, warps=4)


def fp8_rows(x: Tensor, codes: Tensor, scale: Tensor, tile: Fp8Tile | None = None) -> Tensor:
    """y [M, N] of x [M, K], codes [N, K] in e4m3 and scale [N] in float32."""
    assert x.is_contiguous()
    assert codes.is_contiguous()
    (M, K), N = x.shape, codes.shape[0]
    chosen = tile or fp8_tile_for(M, N, K, x.device)
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    partial = torch.empty(chosen.split * M * N, device=x.device, dtype=torch.float32) if chosen.split > 1 else y
    grid = (triton.cdiv(N, chosen.block_n), chosen.split, triton.cdiv(M, chosen.block_m))
    with on_device_of(x):
        fp8_rows_kernel[grid](
            x,
            codes,
            scale,
            y,
            partial,
            finish_counters(x.device),
            M,
            N,
            chosen.split,
            K=K,
            IS_SHARED=chosen.split > 1,
            BLOCK_M=chosen.block_m,
            BLOCK_N=chosen.block_n,
            BLOCK_K=chosen.block_k,
            STAGES=chosen.stages,
            num_warps=chosen.warps,
        )
    return y
