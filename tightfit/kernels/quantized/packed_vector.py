"""x · Wᵀ for a packed weight and one token, in integer arithmetic, fused with the operations around it.

    y[n] = Σ_t S[n, t] · s[t] · Σ_{k in t} (q[n, k] − Z[n, t]) · X[k]        x[k] = s[t] · X[k], |X| ≤ 32 512

Inputs are rounded to 16-bit integers, with a scale for each tile t of neighbouring inputs. bfloat16 has lost more than
that before: a tile's largest input a is uncertain by 2⁻⁹ · a, and all 128 roundings to steps of a / 32 512 are worth
2⁻¹³ · a together. Products of bytes are then exact, four to an instruction (dp4a): X is 256 · h + l, a mask gives four
codes, and seven instructions do eight weights. Floats would need 17, more than fit into the time of reading 4 bits a
weight.

A thread has four words of a tile in all rows of its program. It computes the bytes of its own X once, with the sums
that zero points and RMSNorm need (vector_inputs.py), and sums over threads at the end: words, bytes and sums
stay in registers. With `overlap` programs load their first words before they wait for the previous kernel. Norm, bias,
residual or gated activation: vector_end.py. Words are in tiles and strips (`packing.py`); scales of
neighbouring rows are best contiguous.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tightfit.kernels.mlp.glu import refuse_changed_up
from tightfit.kernels.operators import on_device_of
from tightfit.kernels.overlap import launch_next, pdl, wait_for_previous
from tightfit.kernels.quantized.packing import TILE_WORDS, has_strips, has_tiles
from tightfit.kernels.quantized.vector_end import finish_outputs, load_or_zeros
from tightfit.kernels.quantized.vector_inputs import inputs_of, larger_magnitude
from tightfit.kernels.triton_support import at_most, has_ptx, is_interpreted, tl, triton
from tightfit.models.spec import Activation

BITS = (4, 8)


class VectorTile(NamedTuple):
    """Rows of the weight per program, tiles of inputs it takes at a time, and its warps."""

    rows: int
    tiles: int
    warps: int
    registers: int | None = None
    """The most a thread may use, where the compiler would take so many that fewer programs run at once."""


def takes_vector(words: Tensor, bits: int, group: int, dtype: torch.dtype) -> bool:
    """Whether the kernel takes such a weight: whole strips of rows, a scale for whole tiles, 16-bit inputs."""
    tile = TILE_WORDS * 32 // bits
    inputs = words.shape[1] * 32 // bits
    whole = has_tiles(inputs, bits) and has_strips(words.shape[0]) and group % tile == 0
    return bits in BITS and whole and dtype in (torch.bfloat16, torch.float16)


@triton.jit
def dp4a(codes, digits, total, SIGNED: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """total + Σ over four bytes of codes (unsigned) · digits (unsigned too, or signed)."""
    if ASM:
        KIND: tl.constexpr = "s32" if SIGNED else "u32"
        return tl.inline_asm_elementwise(
            "dp4a.u32." + KIND + " $0, $1, $2, $3;",
            "=r,r,r,r",
            [codes, digits, total],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    for byte in tl.static_range(4):
        digit = (digits << (24 - 8 * byte)) >> 24
        total += ((codes >> (8 * byte)) & 255) * (digit if SIGNED else digit & 255)
    return total


@triton.jit
def bytes_of(a, b, c, d, HIGH: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The lowest bytes of four integers packed into one, a's lowest; with `HIGH` their second lowest bytes."""
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
def scales_at(scale_ptr, zero_ptr, group, here, HAS_ZERO: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scales and zero points of groups [rows, tiles]."""
    scale, zero = tl.load(scale_ptr + group, mask=here, other=0.0), tl.full(group.shape, 1 << (BITS - 1), tl.uint8)
    if HAS_ZERO:
        zero = tl.load(zero_ptr + group, mask=here, other=0)
    return scale, zero


@triton.jit
def pairs_of_tiles(ptr, tile, COUNT: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pairs of 16-bit inputs (or norm weights) for the codes of words [tiles, 16], by mask and place [tiles, 16,
    masks, 2]."""
    PLACES: tl.constexpr = 16 // BITS
    here = (tile < COUNT)[:, None]
    at = ptr.to(tl.pointer_type(tl.int32)) + tile[:, None] * (16 * PLACES) + tl.arange(0, 16)[None, :]
    pairs = tl.join(tl.load(at, mask=here, other=0), tl.load(at + 16 * (PLACES // 2), mask=here, other=0))
    if BITS == 4:
        others = tl.join(tl.load(at + 16, mask=here, other=0), tl.load(at + 48, mask=here, other=0))
        found = tl.permute(tl.join(pairs, others), (0, 1, 3, 2))
    else:
        found = tl.reshape(pairs, (tile.shape[0], 16, 1, 2))
    return found


@triton.jit
def integers(value, inverse):  # type: ignore[no-untyped-def]
    """round(value · inverse) in the lowest 16 bits: a float near 1.5 · 2²³ has no room for a fraction."""
    return (value * inverse[:, None, None, None] + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def digits_of(low, high, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """From inputs [tiles, 16, masks, 2]: lower and upper bytes of X [tiles, 16, masks], s [tiles], and Σ X over every
    four words [tiles · 4]."""
    TILES: tl.constexpr = low.shape[0]
    peak = tl.max(tl.reshape(larger_magnitude(low, high), (TILES, 16 * low.shape[2] * 2)), 1)
    inverse = 32512.0 / tl.maximum(peak, 1e-30)
    a, b = tl.split(integers(low, inverse))
    c, d = tl.split(integers(high, inverse))
    lower = bytes_of(a, b, c, d, False, ASM)
    upper = bytes_of(a, b, c, d, True, ASM)
    ones, none = tl.full(lower.shape, 0x01010101, tl.int32), tl.zeros(lower.shape, tl.int32)
    sums = dp4a(ones, upper, none, True, ASM) * 256 + dp4a(ones, lower, none, False, ASM)
    return lower, upper, peak / 32512.0, tl.sum(tl.reshape(sums, (TILES * 4, 4 * low.shape[2])), 1)


@triton.jit
def products(words, lower, upper, BITS: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Σ codes · X over every four words: words [rows, tiles · 16] times X's bytes [tiles, 16, masks]."""
    MASK: tl.constexpr = 0x0F0F0F0F if BITS == 4 else -1
    QUADS: tl.constexpr = (words.shape[0], words.shape[1] // 4, 4)
    low, high = tl.zeros(words.shape, tl.int32), tl.zeros(words.shape, tl.int32)
    if BITS == 4:
        lower, lower_odd = tl.split(lower)
        upper, upper_odd = tl.split(upper)
        low = dp4a((words >> 4) & MASK, for_rows(lower_odd, words), low, False, ASM)
        high = dp4a((words >> 4) & MASK, for_rows(upper_odd, words), high, True, ASM)
    low = dp4a(words & MASK, for_rows(lower, words), low, False, ASM)
    high = dp4a(words & MASK, for_rows(upper, words), high, True, ASM)
    return tl.sum(tl.reshape(high, QUADS), 2) * 256 + tl.sum(tl.reshape(low, QUADS), 2)


@triton.jit
def for_rows(x, words):  # type: ignore[no-untyped-def]
    """x, repeated for each row of words."""
    return tl.broadcast_to(tl.reshape(x, (1, words.shape[1])), words.shape)


@triton.jit
def for_quads(x):  # type: ignore[no-untyped-def]
    """A number per tile [rows, tiles], in float32, repeated for every four words of the tile."""
    wide = tl.broadcast_to(x.to(tl.float32)[:, :, None], (x.shape[0], x.shape[1], 4))
    return tl.reshape(wide, (x.shape[0], x.shape[1] * 4))


@triton.jit
def packed_vector_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    norm_ptr,
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
    OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    OVERLAP: tl.constexpr,
    ASM: tl.constexpr,
):
    """ROWS rows of the weight, TILES tiles at a time, one block read ahead; tensors are [rows, words]."""
    CODES: tl.constexpr = 16 * 32 // BITS  # of a tile
    COUNT: tl.constexpr = K // CODES
    APART: tl.constexpr = GROUP // CODES if GROUP > 0 else COUNT  # tiles of a group
    X: tl.constexpr = x_ptr.dtype.element_ty
    NORM: tl.constexpr = norm_ptr.dtype.element_ty
    OUTPUTS: tl.constexpr = ROWS if ACTIVATION == "" else ROWS // 2
    in_block, tile, word = tl.arange(0, ROWS), tl.arange(0, TILES), tl.arange(0, TILES * 16)
    n = tl.program_id(0) * OUTPUTS + in_block % OUTPUTS
    row = tl.where(n < N, n, 0) + in_block // OUTPUTS * N
    at_row = (row // 16).to(tl.int64) * (16 * (K * BITS // 32)) + row % 16 * 16
    at_words = words_ptr + at_row[:, None] + (word // 16 * 256 + word % 16)[None, :]
    words = tl.load(at_words, mask=(word < COUNT * 16)[None, :], other=0, eviction_policy="evict_first")
    group = row[:, None] * ROW_STRIDE + (tile // APART)[None, :] * GROUP_STRIDE
    scale, zero = scales_at(scale_ptr, zero_ptr, group, (tile < COUNT)[None, :], HAS_ZERO, BITS)
    bias = load_or_zeros(bias_ptr, row, n < N, HAS_BIAS)
    norm = pairs_of_tiles(norm_ptr, tile, COUNT, BITS) if HAS_NORM else 0
    launch_next(OVERLAP)
    wait_for_previous(OVERLAP)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    residual = load_or_zeros(residual_ptr, output, output < N, HAS_RESIDUAL)
    x = pairs_of_tiles(x_ptr, tile, COUNT, BITS)
    total = tl.zeros((ROWS, TILES * 4), tl.float32)
    squares = tl.zeros((TILES, 16, 8 // BITS, 2), tl.float32)
    for first in tl.range(0, COUNT, TILES, num_stages=1):
        now, now_scale, now_zero = words, scale, zero
        low, high, more = inputs_of(x, norm, X, NORM, HAS_NORM, OFFSET)
        squares += more
        if COUNT > TILES:
            ahead, here = first + TILES + tile, (first + TILES) * 16 + word < COUNT * 16
            at = at_words + (first + TILES) * 256
            words = tl.load(at, mask=here[None, :], other=0, eviction_policy="evict_first")
            group = row[:, None] * ROW_STRIDE + (ahead // APART)[None, :] * GROUP_STRIDE
            scale, zero = scales_at(scale_ptr, zero_ptr, group, (ahead < COUNT)[None, :], HAS_ZERO, BITS)
            x = pairs_of_tiles(x_ptr, ahead, COUNT, BITS)
            norm = pairs_of_tiles(norm_ptr, ahead, COUNT, BITS) if HAS_NORM else 0
        lower, upper, x_scale, x_sum = digits_of(low, high, ASM)
        found = products(now, lower, upper, BITS, ASM).to(tl.float32)
        x_scale = for_quads(x_scale[None, :])
        total += (found - for_quads(now_zero) * x_sum[None, :].to(tl.float32)) * (for_quads(now_scale) * x_scale)
    finish_outputs(
        tl.sum(total, 1),
        tl.sum(squares),
        bias,
        residual,
        y_ptr,
        output,
        eps,
        N,
        K=K,
        HAS_NORM=HAS_NORM,
        ACTIVATION=ACTIVATION,
    )


def vector_tile_for(rows: int, tiles: int, bits: int) -> VectorTile:
    """The tile for a weight of so many rows and tiles in each, as measured for Llama's 8B on an H200 (docs/LOG.md)."""
    if is_interpreted():
        return VectorTile(rows=16, tiles=2, warps=4)
    if bits == 4 and rows >= 16_384:
        return VectorTile(rows=16, tiles=8, warps=1)
    if tiles > 32:
        return VectorTile(rows=8, tiles=32, warps=4, registers=128)
    return VectorTile(rows=16, tiles=32, warps=4)


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
    out_dtype: torch.dtype | None = None,
    overlap: bool = False,
    tile: VectorTile | None = None,
) -> Tensor:
    """y [1, N] of x [1, K], in x's dtype unless `out_dtype` is given."""
    refuse_changed_up(activation, "packed_vector")
    assert zero is None or zero.stride() == scale.stride()
    assert x.is_contiguous()
    (M, K), halves = x.shape, 2 if activation else 1
    assert M == 1
    assert norm is None or norm.dtype.itemsize == 2
    N = words.shape[0] // halves
    y = torch.empty(1, N, device=x.device, dtype=out_dtype or x.dtype)
    chosen = tile or vector_tile_for(words.shape[0], words.shape[1] // TILE_WORDS, bits)
    with on_device_of(x):
        packed_vector_kernel[(triton.cdiv(N, chosen.rows // halves),)](
            x,
            x if norm is None else norm,
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
            OFFSET=norm_offset,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            ACTIVATION=activation,
            ROWS=chosen.rows,
            TILES=chosen.tiles,
            OVERLAP=overlap,
            ASM=has_ptx(),
            num_warps=chosen.warps,
            **pdl(overlap),
            **at_most(chosen.registers),
        )
    return y
