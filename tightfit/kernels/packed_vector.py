"""x · Wᵀ for a packed weight and one token, in integers, with what stands around it.

    y[n] = Σ_t S[n, t] · s[t] · Σ_{k in t} (q[n, k] − Z[n, t]) · X[k]        x[k] = s[t] · X[k], |X| ≤ 32 512

Inputs become integers of 16 bits, with a scale for each tile t of neighbouring ones. That costs less than x has lost
before: a tile's largest input a is uncertain by 2⁻⁹ · a in bfloat16, and all 128 roundings to steps of a / 32 512 are
worth 2⁻¹³ · a together. Products of bytes are then exact, four to an instruction (dp4a): X is 256 · h + l, a mask gives
four codes, and seven instructions do eight weights. Floats would need 17, and reading 4 bits leaves no time for them.

A small kernel makes the bytes of X, s, and the sums that zero points and RMSNorm need; the product's programs ask for
their first words before they wait for it (`overlap`). Norm, bias, residual or gated activation: kernels/vector_end.py.
Words are in tiles and strips (`kernels/packing.py`), scales of neighbouring rows are best neighbours in memory.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tightfit.kernels.operators import on_device_of
from tightfit.kernels.overlap import launch_next, pdl, wait_for_previous
from tightfit.kernels.packed_rows import zero_points
from tightfit.kernels.packing import TILE_WORDS, has_strips, has_tiles
from tightfit.kernels.triton_support import is_interpreted, tl, triton
from tightfit.kernels.vector_end import finish_outputs
from tightfit.models.spec import Activation

BITS = (4, 8)


class VectorTile(NamedTuple):
    """Rows of the weight a program has, tiles of inputs it takes at a time, and its warps."""

    rows: int
    tiles: int
    warps: int


def takes_vector(words: Tensor, bits: int, group: int, dtype: torch.dtype) -> bool:
    """Whether the kernel takes such a weight: whole strips of rows, a scale for whole tiles, 16-bit inputs."""
    tile = TILE_WORDS * 32 // bits
    inputs = words.shape[1] * 32 // bits
    whole = has_tiles(inputs, bits) and has_strips(words.shape[0]) and group % tile == 0
    return bits in BITS and whole and dtype in (torch.bfloat16, torch.float16)


@triton.jit
def dp4a(codes, digits, total, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """total + Σ over four bytes of codes (unsigned) · digits (signed)."""
    if ASM:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [codes, digits, total], dtype=tl.int32, is_pure=True, pack=1
        )
    for byte in tl.static_range(4):
        code = (codes >> (8 * byte)) & 255
        digit = (digits << (24 - 8 * byte)) >> 24
        total += code * digit
    return total


@triton.jit
def bytes_of(a, b, c, d, HIGH: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The lowest bytes of four integers in one, a's lowest; with `HIGH` the bytes above those."""
    if ASM:
        FIRST: tl.constexpr = "0x0051" if HIGH else "0x0040"
        return tl.inline_asm_elementwise(
            "{ .reg .b32 low, high; prmt.b32 low, $1, $2, "
            + FIRST
            + "; prmt.b32 high, $3, $4, "
            + FIRST
            + "; prmt.b32 $0, low, high, 0x5410; }",
            "=r,r,r,r,r",
            [a, b, c, d],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    SHIFT: tl.constexpr = 8 if HIGH else 0
    low = ((a >> SHIFT) & 255) | (((b >> SHIFT) & 255) << 8)
    return low | (((c >> SHIFT) & 255) << 16) | (((d >> SHIFT) & 255) << 24)


@triton.jit
def pair_of(words, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two 16-bit floats in each word, in float32."""
    if DTYPE.fp_mantissa_width == 7:
        return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    low = words.to(tl.int16).to(DTYPE, bitcast=True)
    high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def inputs_at(x_ptr, norm_ptr, k, here, offset, HAS_NORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Inputs k and k + 1 (k even), times the norm's weights, and the sum of their own squares."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    low, high = pair_of(tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + k // 2, mask=here, other=0), DTYPE)
    squares = low * low + high * high
    if HAS_NORM:
        NORM: tl.constexpr = norm_ptr.dtype.element_ty
        first, second = pair_of(tl.load(norm_ptr.to(tl.pointer_type(tl.int32)) + k // 2, mask=here, other=0), NORM)
        low *= first + offset
        high *= second + offset
    return low, high, squares


@triton.jit
def larger(top, low, high):  # type: ignore[no-untyped-def]
    """The largest magnitude so far."""
    return tl.maximum(top, tl.maximum(tl.abs(low), tl.abs(high)))


@triton.jit
def integers(value, inverse):  # type: ignore[no-untyped-def]
    """round(value · inverse) in the lowest 16 bits: 1.5 · 2²³ leaves no room for a fraction."""
    return (value * inverse[:, None] + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def digits_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    norm_ptr,
    digits_ptr,
    scales_ptr,
    offset,
    K: tl.constexpr,
    BITS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    TILES: tl.constexpr,
    OVERLAP: tl.constexpr,
    ASM: tl.constexpr,
):
    """Of TILES tiles: bytes [lower, upper, for every mask, tiles, 16]; s, Σ s · X and Σ x² [3, tiles]."""
    CODES: tl.constexpr = 16 * 32 // BITS  # of a tile
    APART: tl.constexpr = 32 * (8 // BITS)  # inputs whose codes are neighbouring bytes of a word
    COUNT: tl.constexpr = K // CODES
    launch_next(OVERLAP)
    wait_for_previous(OVERLAP)
    tile, word = tl.program_id(0) * TILES + tl.arange(0, TILES), tl.arange(0, 16)
    here = (tile < COUNT)[:, None]
    k = tile[:, None] * CODES + 2 * word[None, :]
    squares = tl.zeros((TILES, 16), tl.float32)
    a, c, more = inputs_at(x_ptr, norm_ptr, k, here, offset, HAS_NORM)
    b, d, rest = inputs_at(x_ptr, norm_ptr, k + APART, here, offset, HAS_NORM)
    squares += more + rest
    top = larger(larger(tl.zeros((TILES, 16), tl.float32), a, c), b, d)
    e, f, g, h = a, b, c, d
    if BITS == 4:
        e, g, more = inputs_at(x_ptr, norm_ptr, k + 32, here, offset, HAS_NORM)
        f, h, rest = inputs_at(x_ptr, norm_ptr, k + 32 + APART, here, offset, HAS_NORM)
        squares += more + rest
        top = larger(larger(top, e, g), f, h)
    peak = tl.max(top, 1)
    inverse = 32512.0 / tl.maximum(peak, 1e-30)
    at = digits_ptr + tile[:, None] * 16 + word[None, :]
    a, b, c, d = integers(a, inverse), integers(b, inverse), integers(c, inverse), integers(d, inverse)
    low = bytes_of(a, b, c, d, False, ASM)
    high = bytes_of(a + 128, b + 128, c + 128, d + 128, True, ASM)  # h = (X + 128) >> 8, so that l is signed
    tl.store(at, low, mask=here)
    tl.store(at + COUNT * 16, high, mask=here)
    ones = tl.full((TILES, 16), 0x01010101, tl.int32)
    none = tl.zeros((TILES, 16), tl.int32)
    low_sum, high_sum = dp4a(ones, low, none, ASM), dp4a(ones, high, none, ASM)
    if BITS == 4:
        e, f, g, h = integers(e, inverse), integers(f, inverse), integers(g, inverse), integers(h, inverse)
        low = bytes_of(e, f, g, h, False, ASM)
        high = bytes_of(e + 128, f + 128, g + 128, h + 128, True, ASM)
        tl.store(at + 2 * COUNT * 16, low, mask=here)
        tl.store(at + 3 * COUNT * 16, high, mask=here)
        low_sum, high_sum = dp4a(ones, low, low_sum, ASM), dp4a(ones, high, high_sum, ASM)
    scale = peak / 32512.0
    sums = tl.sum(high_sum * 256 + low_sum, 1).to(tl.float32)
    tl.store(scales_ptr + tile, scale, mask=tile < COUNT)
    tl.store(scales_ptr + COUNT + tile, scale * sums, mask=tile < COUNT)
    if HAS_NORM:
        tl.store(scales_ptr + 2 * COUNT + tile, tl.sum(squares, 1), mask=tile < COUNT)


@triton.jit
def packed_vector_kernel(  # type: ignore[no-untyped-def]
    digits_ptr,
    scales_ptr,
    words_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    eps,
    N,
    K: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    GROUP_STRIDE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    MOST_TILES: tl.constexpr,
    OVERLAP: tl.constexpr,
    ASM: tl.constexpr,
):
    """ROWS rows of the weight, TILES tiles at a time; tensors are [tiles, rows of the weight, words of a tile]."""
    CODES: tl.constexpr = 16 * 32 // BITS  # of a tile
    COUNT: tl.constexpr = K // CODES
    MASK: tl.constexpr = 0x0F0F0F0F if BITS == 4 else -1
    OUTPUTS: tl.constexpr = ROWS if ACTIVATION == "" else ROWS // 2
    in_block, tile, word = tl.arange(0, ROWS), tl.arange(0, TILES), tl.arange(0, 16)
    n = tl.program_id(0) * OUTPUTS + in_block % OUTPUTS
    row = tl.where(n < N, n, 0) + in_block // OUTPUTS * N
    at_row = (row // 16).to(tl.int64) * (16 * (K * BITS // 32)) + row % 16 * 16
    at_words = words_ptr + at_row[None, :, None] + (tile * 256)[:, None, None] + word[None, None, :]
    words = tl.load(at_words, mask=(tile < COUNT)[:, None, None], other=0, eviction_policy="evict_first")
    later = (TILES + tile < COUNT)[:, None, None]
    following = tl.load(at_words + TILES * 256, mask=later, other=0, eviction_policy="evict_first")
    launch_next(OVERLAP)
    wait_for_previous(OVERLAP)
    total = tl.zeros((TILES, ROWS), tl.float32)
    for first in tl.range(0, COUNT, TILES, num_stages=1):
        now, words, here = words, following, (first + tile < COUNT)[:, None]
        later = (first + 2 * TILES + tile < COUNT)[:, None, None]  # read while two blocks are multiplied
        following = tl.load(at_words + (first + 2 * TILES) * 256, mask=later, other=0, eviction_policy="evict_first")
        group = row[None, :] * ROW_STRIDE
        if GROUP > 0:
            group += ((first + tile) * CODES // GROUP)[:, None] * GROUP_STRIDE
        scale = tl.load(scale_ptr + group, mask=here, other=0.0).to(tl.float32)
        zero = zero_points(zero_ptr, tl.where(here, group, 0), HAS_ZERO, BITS)
        at = digits_ptr + (first + tile)[:, None] * 16 + word[None, :]
        low, high = tl.load(at, mask=here, other=0), tl.load(at + COUNT * 16, mask=here, other=0)
        codes = now & MASK
        empty = tl.zeros((TILES, ROWS, 16), tl.int32)
        low_found = dp4a(codes, tl.broadcast_to(low[:, None, :], codes.shape), empty, ASM)
        high_found = dp4a(codes, tl.broadcast_to(high[:, None, :], codes.shape), empty, ASM)
        if BITS == 4:
            low = tl.load(at + 2 * COUNT * 16, mask=here, other=0)
            high = tl.load(at + 3 * COUNT * 16, mask=here, other=0)
            codes = (now >> 4) & MASK
            low_found = dp4a(codes, tl.broadcast_to(low[:, None, :], codes.shape), low_found, ASM)
            high_found = dp4a(codes, tl.broadcast_to(high[:, None, :], codes.shape), high_found, ASM)
        found = tl.sum(high_found * 256 + low_found, 2).to(tl.float32)
        x_scale = tl.load(scales_ptr + first + tile, mask=first + tile < COUNT, other=0.0)
        x_sum = tl.load(scales_ptr + COUNT + first + tile, mask=first + tile < COUNT, other=0.0)
        total += (found * x_scale[:, None] - zero * x_sum[:, None]) * scale
    y = tl.sum(total, 0)
    finish_outputs(
        y,
        row,
        scales_ptr + 2 * COUNT,
        bias_ptr,
        residual_ptr,
        y_ptr,
        eps,
        N,
        K=K,
        PARTS=COUNT,
        MOST_PARTS=MOST_TILES,
        HAS_NORM=HAS_NORM,
        HAS_BIAS=HAS_BIAS,
        HAS_RESIDUAL=HAS_RESIDUAL,
        ACTIVATION=ACTIVATION,
        OUTPUTS=OUTPUTS,
    )


def vector_tile_for(rows: int, inputs: int) -> VectorTile:
    """For a weight of so many rows and inputs, as measured for Llama's 8B on an H200 (docs/LOG.md)."""
    if is_interpreted():
        return VectorTile(rows=16, tiles=2, warps=4)
    if rows >= 16_384:
        return VectorTile(rows=32, tiles=2, warps=4)
    return VectorTile(rows=16, tiles=16, warps=16 if inputs > 4096 else 4)


class Digits(NamedTuple):
    """What the product takes of an input: bytes of X, and s, Σ s · X and Σ x² of each tile."""

    bytes: Tensor
    scales: Tensor


def digits_of(
    x: Tensor, bits: int, *, norm: Tensor | None = None, norm_offset: float = 0.0, overlap: bool = False
) -> Digits:
    """Of x [1, K]; with `norm` of x times the weights of an RMSNorm."""
    assert norm is None or norm.dtype == x.dtype
    K = x.shape[1]
    count = K * bits // 32 // TILE_WORDS
    digits = torch.empty(2 * (8 // bits), count * TILE_WORDS, device=x.device, dtype=torch.int32)
    scales = torch.empty(3, count, device=x.device, dtype=torch.float32)
    tiles = 2 if is_interpreted() else 8
    with on_device_of(x):
        digits_kernel[(triton.cdiv(count, tiles),)](
            x,
            x if norm is None else norm,
            digits,
            scales,
            norm_offset,
            K=K,
            BITS=bits,
            HAS_NORM=norm is not None,
            TILES=tiles,
            OVERLAP=overlap,
            ASM=_has_asm(),
            num_warps=4,
            **pdl(overlap),
        )
    return Digits(bytes=digits, scales=scales)


def packed_vector(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bits: int,
    group: int,
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    norm_eps: float = 0.0,
    norm_offset: float = 0.0,
    residual: Tensor | None = None,
    activation: Activation | Literal[""] = "",
    overlap: bool = False,
    tile: VectorTile | None = None,
) -> Tensor:
    """y [1, N] of x [1, K]."""
    assert zero is None or zero.stride() == scale.stride()
    assert x.is_contiguous()
    (M, K), halves = x.shape, 2 if activation else 1
    assert M == 1
    N = words.shape[0] // halves
    digits = digits_of(x, bits, norm=norm, norm_offset=norm_offset, overlap=overlap)
    y = torch.empty(1, N, device=x.device, dtype=x.dtype)
    chosen = tile or vector_tile_for(words.shape[0], K)
    with on_device_of(x):
        packed_vector_kernel[(triton.cdiv(N, chosen.rows // halves),)](
            digits.bytes,
            digits.scales,
            words,
            scale,
            words if zero is None else zero,
            x if bias is None else bias,
            x if residual is None else residual,
            y,
            norm_eps,
            N,
            K=K,
            ROW_STRIDE=scale.stride(0),
            GROUP_STRIDE=scale.stride(1),
            BITS=bits,
            GROUP=group,
            HAS_ZERO=zero is not None,
            HAS_NORM=norm is not None,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            ACTIVATION=activation,
            ROWS=chosen.rows,
            TILES=chosen.tiles,
            MOST_TILES=triton.next_power_of_2(digits.scales.shape[1]),
            OVERLAP=overlap,
            ASM=_has_asm(),
            num_warps=chosen.warps,
            **pdl(overlap),
        )
    return y


def _has_asm() -> bool:
    """Whether kernels may use NVIDIA's instructions."""
    return not is_interpreted() and torch.version.hip is None
