"""x · Wᵀ for a weight of 2, 4 or 8-bit integers in groups, read packed: at 4 bits a quarter of the bytes of 16.

    y[m, n] = Σ_g S[n, g] · Σ_{k in g} x[m, k] · (q[n, k] − Z[n, g])

Up to 16 rows (decoding), time goes to reading the weight: packed_rows.py. Up to some hundred, it goes to
unpacking: at 4 bits on Hopper in packed_blocks.py, otherwise in the kernel here. A program reads a block of
words, unpacks them to 16-bit floats in registers and multiplies on tensor cores, the weight as the left factor; zero
points are subtracted from the codes, scales applied to the sum over a group. Where outputs alone give too few programs
to keep the card busy, several split the inputs (split-K); the last one to finish adds up their partial sums.

With many rows time goes to arithmetic, and the matrix is expanded (dequantized to 16 bits) once and multiplied by
cuBLAS: expanding moves 2.5 bytes a weight, little beside the product from a few hundred rows on.

Words are in tiles (`packing.py`). Groups must be multiples of 32 that divide a tile or are divided by it (or 0:
one scale a row). Other widths, and groups out of order (GPTQ's g_idx), are expanded in plain torch. Not differentiable.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.errors import UserError
from tightfit.kernels.mlp.glu import glu
from tightfit.kernels.operators import finish_counters, multiprocessors, on_device_of, operator
from tightfit.kernels.quantized.packed_blocks import MOST_ROWS as MOST_BLOCK_ROWS
from tightfit.kernels.quantized.packed_blocks import packed_blocks, takes_blocks
from tightfit.kernels.quantized.packed_rows import (
    MOST_ROWS,
    by_group,
    codes_of_step,
    has_lop3,
    packed_rows,
    words_of_row,
    zero_points,
)
from tightfit.kernels.quantized.packing import TILE_WORDS, has_strips, has_tiles, unpack_tiles
from tightfit.kernels.triton_support import Impl, is_interpreted, tl, triton, use_triton
from tightfit.models.spec import Activation

BITS = (2, 4, 8)
SOME_ROWS = 128
"""Up to this many rows are multiplied without expanding the matrix."""
STEP = 2 * TILE_WORDS
"""Inputs that one shift of a tile gives; scales change between steps."""
PROGRAMS_PER_PROCESSOR = 7
"""With few rows, so that reads of some overlap the others' arithmetic; measured on an H200
(benchmarks/quantized_linear.py)."""


def quantized_linear(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bits: int,
    group: int,
    *,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    overlap: bool = False,
    impl: Impl = "auto",
) -> Tensor:
    """x [..., K] times the transpose of the weight in `words` [N, K · bits / 32], scale and zero [N, groups]; with
    `activation` the weight is gate over up and the product is gated; `residual` [..., N] is added. `overlap`: see
    kernels/overlap.py."""
    if not (use_triton(impl, x) and can_be_fused(x.shape[-1], bits, group)):
        return _finished(quantized_linear_eager(x, words, scale, zero, bits, group), activation, residual)
    _check(x, words, scale, bits, group)
    if zero is not None and zero.stride() != scale.stride():
        scale, zero = by_group(scale), by_group(zero)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if MOST_ROWS < len(rows) <= MOST_BLOCK_ROWS and takes_blocks(rows, words, scale, zero, bits, group):
        made: Tensor = packed_blocks(rows, words, scale, zero, group, overlap)
        return _finished(made.view(*x.shape[:-1], -1), activation, residual)
    if len(rows) > SOME_ROWS or x.dtype == torch.float32:
        return _finished(F.linear(x, _expand(words, scale, zero, bits, group, x.dtype)), activation, residual)
    if len(rows) > MOST_ROWS:
        some: Tensor = _some(rows, words, scale, zero, bits, group)
        return _finished(some.view(*x.shape[:-1], -1), activation, residual)
    added = None if residual is None else residual.reshape(len(rows), -1).contiguous()
    few: Tensor = packed_rows(rows, words, scale, zero, added, bits, group, activation or "", overlap)
    return few.view(*x.shape[:-1], -1)


def _finished(made: Tensor, activation: Activation | None, residual: Tensor | None) -> Tensor:
    """Activation and residual after a product, as separate operations."""
    if activation is not None:
        gate, up = made.chunk(2, dim=-1)
        made = glu(gate, up, activation)
    return made if residual is None else made + residual


def quantized_linear_eager(
    x: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group: int
) -> Tensor:
    """The reference: expand, multiply."""
    return F.linear(x, expanded_eager(words, scale, zero, bits, x.shape[-1], x.dtype))


def expanded(
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bits: int,
    inputs: int,
    group: int,
    dtype: torch.dtype,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """The dequantized matrix [N, K]."""
    if not (use_triton(impl, scale) and can_be_fused(inputs, bits, group)):
        return expanded_eager(words, scale, zero, bits, inputs, dtype)
    if zero is not None and zero.stride() != scale.stride():
        scale, zero = by_group(scale), by_group(zero)
    matrix: Tensor = _expand(words, scale, zero, bits, group, dtype)
    return matrix


def expanded_eager(
    words: Tensor, scale: Tensor, zero: Tensor | None, bits: int, inputs: int, dtype: torch.dtype
) -> Tensor:
    """The dequantized matrix [N, K]."""
    codes = unpack_tiles(words, bits, inputs).to(torch.float32).unflatten(1, (scale.shape[1], -1))
    offset = 2 ** (bits - 1) if zero is None else zero.to(torch.float32)[..., None]
    return codes.sub_(offset).mul_(scale.to(torch.float32)[..., None]).flatten(1).to(dtype)


def can_be_fused(inputs: int, bits: int, group: int) -> bool:
    """Whether the kernels take a weight of so many inputs, bits and inputs per group."""
    tile = TILE_WORDS * 32 // bits
    return has_tiles(inputs, bits) and group % STEP == 0 and (group == 0 or group % tile == 0 or tile % group == 0)


def _check(x: Tensor, words: Tensor, scale: Tensor, bits: int, group: int) -> None:
    inputs = x.shape[-1]
    groups = 1 if group == 0 else -(-inputs // group)
    if words.shape[1] * 32 // bits != inputs or tuple(scale.shape) != (words.shape[0], groups):
        raise UserError(
            f"quantized_linear got x of {inputs} inputs, words {list(words.shape)} of {bits} bits and scales "
            f"{list(scale.shape)} for groups of {group}; they do not belong together"
        )


@triton.jit(do_not_specialize=["M", "split"])
def some_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    words_ptr,
    scale_ptr,
    zero_ptr,
    y_ptr,
    partial_ptr,
    counter_ptr,
    M,
    N,
    K,
    row_stride,
    group_stride,
    split,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    STRIPS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    IS_SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    LOP3: tl.constexpr,
):
    """BLOCK_N outputs of BLOCK_M rows over one of `split` parts of the inputs."""
    TILE: tl.constexpr = 16
    PER: tl.constexpr = 32 // BITS
    PER_BLOCK: tl.constexpr = 1 if GROUP == 0 or GROUP > TILE * PER else TILE * PER // GROUP  # scales of a tile
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    share, m_block = tl.program_id(1), tl.program_id(2)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    at, column = tl.arange(0, TILE), tl.arange(0, 2 * TILE)
    in_n, in_m = n < N, m < M
    width = K // PER
    steps = width // TILE
    first, last = steps * share // split, steps * (share + 1) // split
    row = tl.where(in_n, n, 0).to(tl.int64)
    at_row = words_of_row(row, width, STRIPS)
    TILE_STRIDE: tl.constexpr = TILE * 16 if STRIPS else TILE
    group = row * row_stride
    if GROUP > 0:
        group += first * TILE * PER // GROUP * group_stride
    scale = tl.load(scale_ptr + group)  # a block's scales are loaded while the block before is multiplied
    zero = zero_points(zero_ptr, group, HAS_ZERO, BITS)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        start = step * TILE
        words = tl.load(words_ptr + at_row[:, None] + (step * TILE_STRIDE + at)[None, :])
        now_scale, now_zero = scale, zero
        if PER_BLOCK == 1 and GROUP > 0:
            group = row * row_stride + tl.minimum(step + 1, last - 1) * TILE * PER // GROUP * group_stride
            scale, zero = tl.load(scale_ptr + group), zero_points(zero_ptr, group, HAS_ZERO, BITS)
        found = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for s in tl.static_range(PER // 2):
            if PER_BLOCK > 1 and s % (PER // 2 // PER_BLOCK) == 0:
                group = row * row_stride + (start * PER + s * 2 * TILE) // GROUP * group_stride
                now_scale, now_zero = tl.load(scale_ptr + group), zero_points(zero_ptr, group, HAS_ZERO, BITS)
            k = start * PER + s * 2 * TILE + column
            x = tl.load(x_ptr + m[None, :] * K + k[:, None], mask=in_m[None, :], other=0.0)
            code, added = codes_of_step(words, s, BITS, DTYPE, LOP3)
            code -= (now_zero + added).to(DTYPE)[:, None]
            found = tl.dot(code.to(DTYPE), x, found)
            if (s + 1) % (PER // 2 // PER_BLOCK) == 0:
                total += found * now_scale.to(tl.float32)[:, None]
                found = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
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
def expand_kernel(  # type: ignore[no-untyped-def]
    words_ptr,
    scale_ptr,
    zero_ptr,
    weight_ptr,
    N,
    K,
    row_stride,
    group_stride,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    STRIPS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,
):
    """TILES tiles of BLOCK_N rows of the weight; the codes of one shift have one scale and one zero point."""
    TILE: tl.constexpr = 16
    PER: tl.constexpr = 32 // BITS
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    at, pair = tl.arange(0, TILE), tl.arange(0, 2 * TILE)
    width = K // PER
    row = n.to(tl.int64)[:, None]
    here = (n < N)[:, None] & (tile < width // TILE)[None, :]
    first_word = words_of_row(row, width, STRIPS) + (tile * (TILE * 16 if STRIPS else TILE))[None, :]
    words = tl.load(words_ptr + first_word[:, :, None] + at[None, None, :], mask=here[:, :, None], other=0)
    for s in tl.static_range(PER // 2):
        first = (tile * (TILE * PER) + s * 2 * TILE)[None, :]
        group = row * row_stride + (first // GROUP if GROUP > 0 else first * 0) * group_stride
        scale = tl.load(scale_ptr + group, mask=here, other=0.0).to(tl.float32)
        code, added = codes_of_step(words, s, BITS, tl.float16, False)
        if HAS_ZERO:
            offset = tl.load(zero_ptr + group, mask=here, other=0).to(tl.float32) + added
        else:
            offset = tl.full(group.shape, (1 << (BITS - 1)) + added, tl.float32)
        value = (code.to(tl.float32) - offset[:, :, None]) * scale[:, :, None]
        out = weight_ptr + (row * K + first)[:, :, None] + pair[None, None, :]
        tl.store(out, value.to(weight_ptr.dtype.element_ty), mask=here[:, :, None])


class Tiles(NamedTuple):
    """How the product is tiled: rows and outputs of a block, programs that split the inputs, stages, warps."""

    block_m: int
    block_n: int
    split: int
    stages: int
    warps: int


def tiles_for(M: int, N: int, K: int, bits: int, device: torch.device) -> Tiles:
    """Enough programs for every multiprocessor; with more than 64 rows a program needs eight warps for its sums."""
    if is_interpreted():
        return Tiles(block_m=16, block_n=16, split=2, stages=1, warps=4)
    block_m, block_n = min(max(triton.next_power_of_2(M), 16), 128), 128
    programs = triton.cdiv(N, block_n) * triton.cdiv(M, block_m)
    steps = K * bits // 32 // TILE_WORDS
    wanted = multiprocessors(device) * (PROGRAMS_PER_PROCESSOR if block_m <= 32 else 1)
    split = max(1, min(wanted // programs, steps // 4, 16))
    return Tiles(block_m=block_m, block_n=block_n, split=split, stages=3, warps=4 if block_m <= 64 else 8)


def _run_some(x: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group: int) -> Tensor:
    tiles = tiles_for(len(x), words.shape[0], x.shape[1], bits, x.device)
    return launch_some(x, words, scale, zero, bits, group, tiles)


def launch_some(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bits: int,
    group: int,
    tiles: Tiles,
) -> Tensor:
    """The product, tiled as `tiles` say."""
    (M, K), N = x.shape, words.shape[0]
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    partial = torch.empty(tiles.split * M * N, device=x.device, dtype=torch.float32) if tiles.split > 1 else y
    grid = (triton.cdiv(N, tiles.block_n), tiles.split, triton.cdiv(M, tiles.block_m))
    with on_device_of(x):
        some_rows_kernel[grid](
            x,
            words,
            scale,
            words if zero is None else zero,
            y,
            partial,
            finish_counters(x.device),
            M,
            N,
            K,
            scale.stride(0),
            scale.stride(1),
            tiles.split,
            BITS=bits,
            GROUP=group,
            STRIPS=has_strips(words.shape[0]),
            HAS_ZERO=zero is not None,
            IS_SHARED=tiles.split > 1,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            STAGES=tiles.stages,
            LOP3=has_lop3(),
            num_warps=tiles.warps,
        )
    return y


def _run_expand(words: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group: int, dtype: torch.dtype) -> Tensor:
    N, K = words.shape[0], words.shape[1] * 32 // bits
    weight = torch.empty(N, K, device=words.device, dtype=dtype)
    block_n, tiles = (16, 1) if is_interpreted() else (16, 2)
    with on_device_of(words):
        expand_kernel[(triton.cdiv(words.shape[1], tiles * TILE_WORDS), triton.cdiv(N, block_n))](
            words,
            scale,
            zero if zero is not None else words,
            weight,
            N,
            K,
            scale.stride(0),
            scale.stride(1),
            BITS=bits,
            GROUP=group,
            STRIPS=has_strips(words.shape[0]),
            HAS_ZERO=zero is not None,
            BLOCK_N=block_n,
            TILES=tiles,
            num_warps=4,
        )
    return weight


_some = operator(
    "quantized_linear(Tensor x, Tensor words, Tensor scale, Tensor? zero, int bits, int group) -> Tensor",
    _run_some,
    lambda x, words, scale, zero, bits, group: x.new_empty(x.shape[0], words.shape[0]),
)
_expand = operator(
    "expand_codes(Tensor words, Tensor scale, Tensor? zero, int bits, int group, ScalarType dtype) -> Tensor",
    _run_expand,
    lambda words, scale, zero, bits, group, dtype: words.new_empty(
        words.shape[0], words.shape[1] * 32 // bits, dtype=dtype
    ),
)
