"""x · Wᵀ for a weight of 8-bit floats with a scale a row and one token, with what stands around it.

    y[n] = S[n] · Σ_c s[c] · Σ_{k in c} W[n, k] · X[k]        x[k] = s[c] · X[k], |X| < 1, s a power of two

A small kernel makes X, in float16, with a scale for each chunk c of inputs. Of bfloat16 inputs it is exact but for what
is 2¹⁴ times smaller than the chunk's largest; after a norm it is rounded to 11 bits, where a norm alone leaves 8.
Products with codes are float16, two to an instruction: 4 bits times 11, rounded to 11, and summed in pairs; all further
sums are float32. What limits such a product is the way from the L2 cache: a program has many rows of the weight, or it
would read as much of x as of them, and reads X, not x and a norm's weights. Norm, bias, residual or gated
activation: kernels/vector_end.py. Inputs must be whole chunks.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tightfit.kernels.operators import on_device_of
from tightfit.kernels.overlap import launch_next, pdl, wait_for_previous
from tightfit.kernels.triton_support import is_interpreted, tl, triton
from tightfit.kernels.vector_end import finish_outputs
from tightfit.models.spec import Activation

CHUNK = 512


class Fp8VectorTile(NamedTuple):
    """Rows of the weight a program has, and its warps."""

    rows: int
    warps: int


@triton.jit
def dot_of_four(words, first, second, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Σ of four e4m3 numbers in each word times four float16 numbers in two, in float32."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 a, b;
            .reg .b32 u, v;
            .reg .f32 x, y;
            mov.b32 {a, b}, $1;
            cvt.rn.f16x2.e4m3x2 u, a;
            cvt.rn.f16x2.e4m3x2 v, b;
            mul.rn.f16x2 u, u, $2;
            fma.rn.f16x2 u, v, $3, u;
            mov.b32 {a, b}, u;
            cvt.f32.f16 x, a;
            cvt.f32.f16 y, b;
            add.rn.f32 $0, x, y;
            }""",
            "=f,r,r,r",
            [words, first, second],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    total = tl.zeros(words.shape, tl.float32)
    for byte in tl.static_range(4):
        code = ((words >> (8 * byte)) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        pair = first if byte < 2 else second
        value = (pair >> (16 * (byte % 2))).to(tl.int16).to(tl.float16, bitcast=True)
        total += code.to(tl.float32) * value.to(tl.float32)
    return total


@triton.jit
def halves_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    norm_ptr,
    halves_ptr,
    sums_ptr,
    offset,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """X of one chunk, s and Σ x² of it."""
    launch_next(OVERLAP)
    wait_for_previous(OVERLAP)
    chunk = tl.program_id(0)
    k = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(x_ptr + k).to(tl.float32)
    if HAS_NORM:
        tl.store(sums_ptr + CHUNKS + chunk, tl.sum(x * x, 0))
        x *= tl.load(norm_ptr + k).to(tl.float32) + offset
    peak = tl.maximum(tl.max(tl.abs(x), 0), 1e-30)
    above = (peak.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * 2.0  # the next power of two
    tl.store(sums_ptr + chunk, above)
    tl.store(halves_ptr + k, (x / above).to(tl.float16))


@triton.jit
def fp8_vector_kernel(  # type: ignore[no-untyped-def]
    halves_ptr,
    sums_ptr,
    words_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    eps,
    N,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    MOST_CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
    ASM: tl.constexpr,
):
    """ROWS rows of the weight, a chunk of inputs at a time, two read ahead."""
    WORDS: tl.constexpr = CHUNK // 4
    OUTPUTS: tl.constexpr = ROWS if ACTIVATION == "" else ROWS // 2
    in_block, word = tl.arange(0, ROWS), tl.arange(0, WORDS)
    n = tl.program_id(0) * OUTPUTS + in_block % OUTPUTS
    row = tl.where(n < N, n, 0) + in_block // OUTPUTS * N
    at = words_ptr + row.to(tl.int64)[:, None] * (CHUNKS * WORDS) + word[None, :]
    words = tl.load(at)
    following = tl.load(at + WORDS, mask=row[:, None] * 0 + 1 < CHUNKS, other=0)
    launch_next(OVERLAP)
    wait_for_previous(OVERLAP)
    total = tl.zeros((ROWS, WORDS), tl.float32)
    for chunk in tl.range(0, CHUNKS, num_stages=1):
        now, words = words, following
        following = tl.load(at + (chunk + 2) * WORDS, mask=row[:, None] * 0 + chunk + 2 < CHUNKS, other=0)
        pairs = halves_ptr.to(tl.pointer_type(tl.int32)) + 2 * (chunk * WORDS + word)
        first = tl.broadcast_to(tl.load(pairs)[None, :], now.shape)
        second = tl.broadcast_to(tl.load(pairs + 1)[None, :], now.shape)
        total += dot_of_four(now, first, second, ASM) * tl.load(sums_ptr + chunk)
    y = tl.sum(total, 1) * tl.load(scale_ptr + row)
    finish_outputs(
        y,
        row,
        sums_ptr + CHUNKS,
        bias_ptr,
        residual_ptr,
        y_ptr,
        eps,
        N,
        K=CHUNKS * CHUNK,
        PARTS=CHUNKS,
        MOST_PARTS=MOST_CHUNKS,
        HAS_NORM=HAS_NORM,
        HAS_BIAS=HAS_BIAS,
        HAS_RESIDUAL=HAS_RESIDUAL,
        ACTIVATION=ACTIVATION,
        OUTPUTS=OUTPUTS,
    )


def fp8_vector_tile_for(rows: int) -> Fp8VectorTile:
    """For a weight of so many rows, as measured for Llama's 8B on an H200 (docs/LOG.md)."""
    if is_interpreted():
        return Fp8VectorTile(rows=4, warps=4)
    return Fp8VectorTile(rows=16 if rows >= 16_384 else 8, warps=4)


def fp8_vector(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    norm_eps: float = 0.0,
    norm_offset: float = 0.0,
    residual: Tensor | None = None,
    activation: Activation | Literal[""] = "",
    out_dtype: torch.dtype | None = None,
    overlap: bool = False,
    tile: Fp8VectorTile | None = None,
) -> Tensor:
    """y [1, N] of x [1, K], codes [N, K] in e4m3 and scale [N] in float32."""
    (M, K), halves = x.shape, 2 if activation else 1
    assert M == 1
    assert K % CHUNK == 0
    assert x.is_contiguous()
    assert codes.is_contiguous()
    N, chunks, device = codes.shape[0] // halves, K // CHUNK, x.device
    scaled = torch.empty(K, device=device, dtype=torch.float16)
    sums = torch.empty(2, chunks, device=device, dtype=torch.float32)
    y = torch.empty(1, N, device=device, dtype=out_dtype or x.dtype)
    chosen = tile or fp8_vector_tile_for(codes.shape[0])
    with on_device_of(x):
        halves_kernel[(chunks,)](
            x,
            x if norm is None else norm,
            scaled,
            sums,
            norm_offset,
            CHUNKS=chunks,
            CHUNK=CHUNK,
            HAS_NORM=norm is not None,
            OVERLAP=overlap,
            num_warps=4,
            **pdl(overlap),
        )
        fp8_vector_kernel[(triton.cdiv(N, chosen.rows // halves),)](
            scaled,
            sums,
            codes.view(torch.int32),
            scale,
            x if bias is None else bias,
            x if residual is None else residual,
            y,
            norm_eps,
            N,
            CHUNKS=chunks,
            CHUNK=CHUNK,
            HAS_NORM=norm is not None,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            ACTIVATION=activation,
            ROWS=chosen.rows,
            MOST_CHUNKS=triton.next_power_of_2(chunks),
            OVERLAP=overlap,
            ASM=not is_interpreted(),
            num_warps=chosen.warps,
            **pdl(overlap),
        )
    return y
