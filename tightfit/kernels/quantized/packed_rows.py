"""x · Wᵀ for a packed weight and up to 16 rows (decoding), fused with a residual or a gated activation.

    y[m, n] = Σ_g S[n, g] · (Σ_{k in g} x[m, k] · (A + q[n, k]) − (A + Z[n, g]) · Σ_{k in g} x[m, k])

Reading the weight once at 4 bits takes a quarter of 16 bits' time, so the cost of unpacking decides: a shift and a mask
per pair of codes, nothing more. A code becomes a 16-bit float as the lowest bits of the number A (128 in bfloat16, 1024
in float16); A and the zero point are subtracted from a group's sum, in float32, at no cost per weight. Σ x is the
product with a matrix of ones, which leaves it in every thread that needs it.

A program has few rows of the weight. Its warps split the inputs and add up at the end: many warps per multiprocessor,
and no partial sums in global memory. Scales of neighbouring rows are best contiguous (`by_group`), as a program loads
them together. The epilogue adds the residual, or is a gated activation: the weight then holds gate over up, [2N, K],
and half of a program's rows are gates. With `overlap` a program loads its first scales before the previous kernel has
ended. Words are in tiles (`packing.py`).
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tightfit.kernels.mlp.glu import activated, refuse_changed_up
from tightfit.kernels.operators import on_device_of, operator
from tightfit.kernels.overlap import launch_next, pdl, wait_for_previous
from tightfit.kernels.quantized.packing import TILE_WORDS, has_strips
from tightfit.kernels.triton_support import is_interpreted, tl, triton
from tightfit.models.spec import Activation

MOST_ROWS = 16


def by_group(scale: Tensor) -> Tensor:
    """Scales or zero points [N, groups] with those of a group contiguous in memory."""
    return scale.t().contiguous().t()


class RowTiles(NamedTuple):
    """How the product is tiled: rows of the weight per program, warps that split the inputs, pipeline stages."""

    block_n: int
    parts: int
    stages: int


@triton.jit
def halves(pairs, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two 16-bit floats in each word, [..., 2 · W]."""
    low = pairs.to(tl.int16).to(DTYPE, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.interleave(low, high)


@triton.jit
def ones_like_codes(words, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Ones [..., 2 · W] in the register layout of the codes of `words`: only then does the compiler load ahead the x
    that both are multiplied by. They depend on `words` (by a bit that is always 0) for that reason."""
    ONE: tl.constexpr = 0x3F803F80 if DTYPE.fp_mantissa_width == 7 else 0x3C003C00
    return halves(((words * 2) & 1) | ONE, DTYPE)


@triton.jit
def codes_of_step(  # type: ignore[no-untyped-def]
    words, S: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, LOP3: tl.constexpr
):
    """The S-th codes of words [..., W] as floats [..., 2 · W], and the number A that is added to each of them."""
    MASK: tl.constexpr = ((1 << BITS) - 1) * 0x00010001
    IS_BF16: tl.constexpr = DTYPE.primitive_bitwidth == 16 and DTYPE.fp_mantissa_width == 7
    if LOP3 and BITS == 4 and IS_BF16:  # (a & b) | c in one instruction, which the compiler does not find
        pairs = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x000f000f, 0x43004300, 0xea;",
            "=r,r",
            [words >> (S * BITS)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        return halves(pairs, DTYPE), 128.0
    pairs = (words >> (S * BITS)) & MASK
    if BITS == 8 and IS_BF16:  # 8 bits do not fit below bfloat16's leading one, but are exact without it
        low = ((pairs & 0xFFFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
        high = ((pairs >> 16) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
        return tl.interleave(low.to(DTYPE), high.to(DTYPE)), 0.0
    ONES: tl.constexpr = 0x43004300 if IS_BF16 else 0x64006400
    return halves(pairs | ONES, DTYPE), 128.0 if IS_BF16 else 1024.0


@triton.jit
def words_of_row(row, width, STRIPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Index of the first word of a row's first tile (packing.py)."""
    if STRIPS:
        return row // 16 * (16 * width) + row % 16 * 16
    return row * width


@triton.jit
def zero_points(zero_ptr, group, HAS_ZERO: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Zero points of groups: loaded, or the middle code where there are none."""
    if HAS_ZERO:
        return tl.load(zero_ptr + group).to(tl.float32)
    return tl.full(group.shape, 1 << (BITS - 1), tl.float32)


@triton.jit(do_not_specialize=["M"])
def packed_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    words_ptr,
    scale_ptr,
    zero_ptr,
    residual_ptr,
    y_ptr,
    M,
    N,
    K: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    GROUP_STRIDE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    STRIPS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
    LOP3: tl.constexpr,
):
    """BLOCK_N rows of the weight times all rows of x; tensors are [parts, rows of the weight, ...]."""
    TILE: tl.constexpr = 16
    PER: tl.constexpr = 32 // BITS
    SCALES: tl.constexpr = 1 if GROUP == 0 or GROUP > TILE * PER else TILE * PER // GROUP  # of a tile
    OUTPUTS: tl.constexpr = BLOCK_N if ACTIVATION == "" else BLOCK_N // 2
    WIDTH: tl.constexpr = K // PER
    STEPS: tl.constexpr = WIDTH // TILE // PARTS
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    in_block, m = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * OUTPUTS + in_block % OUTPUTS
    in_m = m < M
    row = (tl.where(n < N, n, 0) + in_block // OUTPUTS * N).to(tl.int64)
    at_row = words_of_row(row, WIDTH, STRIPS)
    TILE_STRIDE: tl.constexpr = TILE * 16 if STRIPS else TILE
    first = tl.arange(0, PARTS) * STEPS
    word, column = tl.arange(0, TILE), tl.arange(0, 2 * TILE)
    in_row = row[None, :] * ROW_STRIDE
    group = in_row + (first * TILE * PER // GROUP if GROUP > 0 else first * 0)[:, None] * GROUP_STRIDE
    scale = tl.load(scale_ptr + group)  # a tile's scales are loaded while the tile before is multiplied
    zero = zero_points(zero_ptr, group, HAS_ZERO, BITS)
    total = tl.zeros((PARTS, BLOCK_N, BLOCK_M), tl.float32)
    launch_next(OVERLAP)
    wait_for_previous(OVERLAP)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        tile = first + step
        words = tl.load(words_ptr + at_row[None, :, None] + (tile[:, None] * TILE_STRIDE + word[None, :])[:, None, :])
        ones = ones_like_codes(words, DTYPE)
        now_scale, now_zero = scale, zero
        if SCALES == 1 and GROUP > 0:
            later = first + tl.minimum(step + 1, STEPS - 1)
            group = in_row + (later * TILE * PER // GROUP)[:, None] * GROUP_STRIDE
            scale, zero = tl.load(scale_ptr + group), zero_points(zero_ptr, group, HAS_ZERO, BITS)
        found = tl.zeros((PARTS, BLOCK_N, BLOCK_M), tl.float32)
        sums = tl.zeros((PARTS, BLOCK_N, BLOCK_M), tl.float32)
        for s in tl.static_range(PER // 2):
            if SCALES > 1 and s % (PER // 2 // SCALES) == 0:
                group = in_row + ((tile * TILE * PER + s * 2 * TILE) // GROUP)[:, None] * GROUP_STRIDE
                now_scale, now_zero = tl.load(scale_ptr + group), zero_points(zero_ptr, group, HAS_ZERO, BITS)
            k = tile[:, None] * TILE * PER + s * 2 * TILE + column[None, :]
            x = tl.load(x_ptr + m[None, None, :] * K + k[:, :, None], mask=in_m[None, None, :], other=0.0)
            code, added = codes_of_step(words, s, BITS, DTYPE, LOP3)
            found = tl.dot(code, x, found)
            sums = tl.dot(ones, x, sums)
            if (s + 1) % (PER // 2 // SCALES) == 0:
                total += (found - sums * (now_zero + added)[:, :, None]) * now_scale.to(tl.float32)[:, :, None]
                found = tl.zeros((PARTS, BLOCK_N, BLOCK_M), tl.float32)
                sums = tl.zeros((PARTS, BLOCK_N, BLOCK_M), tl.float32)
    y = tl.sum(total, 0)
    if ACTIVATION != "":
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, OUTPUTS, BLOCK_M)), (1, 2, 0)))
        gate, _ = activated(gate, ACTIVATION)
        y = gate * up
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    here = in_m[None, :] & (n < N)[:, None]
    out = m[None, :] * N + n[:, None]
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + out, mask=here, other=0.0).to(tl.float32)
    tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=here)


def row_tiles_for(N: int, K: int, bits: int) -> RowTiles:
    """The tiling for a weight [N, K]: many warps per multiprocessor, each with whole tiles of inputs."""
    if is_interpreted():
        return RowTiles(block_n=16, parts=2 if _tiles(K, bits) % 2 == 0 else 1, stages=1)
    block_n, parts = (64, 2) if N >= 16_384 else (32, 8 if K > 4096 else 4)
    while _tiles(K, bits) % parts:
        parts //= 2
    return RowTiles(block_n=block_n, parts=parts, stages=3)


def has_lop3() -> bool:
    """Whether kernels may use the instruction lop3: they are compiled, for NVIDIA."""
    return not is_interpreted() and torch.version.hip is None


def _tiles(K: int, bits: int) -> int:
    return K * bits // 32 // TILE_WORDS


def launch_packed_rows(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bits: int,
    group: int,
    tiles: RowTiles,
    residual: Tensor | None = None,
    activation: Activation | Literal[""] = "",
    overlap: bool = False,
) -> Tensor:
    """The product, tiled as `tiles` say."""
    refuse_changed_up(activation, "launch_packed_rows")
    assert zero is None or zero.stride() == scale.stride()
    (M, K), halves = x.shape, 2 if activation else 1
    N = words.shape[0] // halves
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    with on_device_of(x):
        packed_rows_kernel[(triton.cdiv(N, tiles.block_n // halves),)](
            x,
            words,
            scale,
            words if zero is None else zero,
            y if residual is None else residual,
            y,
            M,
            N,
            K=K,
            ROW_STRIDE=scale.stride(0),
            GROUP_STRIDE=scale.stride(1),
            BITS=bits,
            GROUP=group,
            STRIPS=has_strips(words.shape[0]),
            HAS_ZERO=zero is not None,
            HAS_RESIDUAL=residual is not None,
            ACTIVATION=activation,
            PARTS=tiles.parts,
            BLOCK_M=16 if M > 8 or is_interpreted() else 8,
            BLOCK_N=tiles.block_n,
            STAGES=tiles.stages,
            OVERLAP=overlap,
            LOP3=has_lop3(),
            num_warps=4 if is_interpreted() else tiles.parts,
            **pdl(overlap),
        )
    return y


def _run(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    residual: Tensor | None,
    bits: int,
    group: int,
    activation: Activation | Literal[""],
    overlap: bool,
) -> Tensor:
    tiles = row_tiles_for(words.shape[0], x.shape[1], bits)
    return launch_packed_rows(x, words, scale, zero, bits, group, tiles, residual, activation, overlap)


packed_rows = operator(
    "packed_rows(Tensor x, Tensor words, Tensor scale, Tensor? zero, Tensor? residual, int bits, int group,"
    " str activation, bool overlap) -> Tensor",
    _run,
    lambda x, words, scale, zero, residual, bits, group, activation, overlap: x.new_empty(
        x.shape[0], words.shape[0] // (2 if activation else 1)
    ),
)
