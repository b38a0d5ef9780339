"""x · Wᵀ for an SpQR weight and up to 16 rows, read compressed: 2 to 4 bits, coded scales, sparse outliers.

    W[n, k] = (q[n, k] − Z[n, g]) · S[n, g], or an outlier's value     S = code · step + start, Z likewise

Dettmers et al. 2023. Groups have 16 inputs, so scales in 16 bits would take a third of what 3-bit codes take: they are
decoded here, for every group and row, from 3 bits and from the range that 16 rows share. A group is one step of tensor
cores, the weight as the left factor: codes become floats as the lowest bits of a constant, and that constant, zero
point and scale are applied to the group's sum, as in packed_rows.py. A program has a few rows, its warps split
the tiles of inputs. When they have added up, the program goes through its rows' outliers: each adds (value − its code's
value) times its input, so that codes at outliers need no masking. That difference is stored as `changes`.

More rows, and float32, are multiplied by the expanded (dequantized) matrix: one kernel decodes it, a second puts the
outliers in their places. A weight that `spqr_layout.py` cannot arrange is expanded by torch. Not
differentiable.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.kernels.operators import on_device_of, operator
from tightfit.kernels.quantized.packed_rows import MOST_ROWS, halves, ones_like_codes
from tightfit.kernels.quantized.spqr_layout import GROUP, STRIP_ROWS, TILE, SpqrTensors, codes_of, scales_of
from tightfit.kernels.triton_support import Impl, is_interpreted, tl, triton, use_triton


def spqr_linear(x: Tensor, weight: SpqrTensors, *, impl: Impl = "auto") -> Tensor:
    """x [..., K] times the transpose of the weight [N, K]."""
    if not use_triton(impl, x):
        return spqr_linear_eager(x, weight)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if len(rows) > MOST_ROWS or x.dtype == torch.float32:
        return F.linear(x, expanded_spqr(weight, x.dtype, impl=impl))
    few: Tensor = _few(rows, *weight)
    return few.view(*x.shape[:-1], -1)


def spqr_linear_eager(x: Tensor, weight: SpqrTensors) -> Tensor:
    """The reference: expand, multiply."""
    return F.linear(x, expanded_spqr_eager(weight, x.dtype))


def expanded_spqr(weight: SpqrTensors, dtype: torch.dtype, *, impl: Impl = "auto") -> Tensor:
    """The dequantized matrix [N, K]."""
    if not use_triton(impl, weight.ranges):
        return expanded_spqr_eager(weight, dtype)
    matrix: Tensor = _expand(*weight[:-1], dtype)
    return matrix


def expanded_spqr_eager(weight: SpqrTensors, dtype: torch.dtype) -> Tensor:
    """The dequantized matrix [N, K]."""
    scale, zero = scales_of(weight)
    codes = codes_of(weight.words).to(torch.float32).view(*scale.shape, GROUP)
    matrix = codes.sub_(zero[..., None]).mul_(scale[..., None]).flatten(1).to(dtype)
    counts = weight.starts.long().diff()
    rows = torch.arange(len(counts), device=matrix.device).repeat_interleave(counts, output_size=len(weight.columns))
    matrix[rows, weight.columns.long()] = weight.values.to(dtype)
    return matrix


@triton.jit
def pairs_of_group(w0, w1, w2, w3, S: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The S-th group's codes of a tile, two in each of the sets' words (spqr_layout.py)."""
    PER: tl.constexpr = 16 // BITS
    MASK: tl.constexpr = ((1 << BITS) - 1) * 0x00010001
    if BITS == 3 and S == 15:
        pairs = ((w0 >> 15) & 0x00010001) | ((w1 >> 14) & 0x00020002) | ((w2 >> 13) & 0x00040004)
    elif S // PER == 0:
        pairs = (w0 >> (S % PER * BITS)) & MASK
    elif S // PER == 1:
        pairs = (w1 >> (S % PER * BITS)) & MASK
    elif S // PER == 2:
        pairs = (w2 >> (S % PER * BITS)) & MASK
    else:
        pairs = (w3 >> (S % PER * BITS)) & MASK
    return pairs


@triton.jit
def steps_and_starts(word, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two float16 of words [parts, strips] in float32, for every row; the start is that of 128 + code."""
    step = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    start = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) - 128.0 * step
    return by_row(step, ROWS), by_row(start, ROWS)


@triton.jit
def by_row(strip, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[parts, strips] as [parts, rows]."""
    PARTS: tl.constexpr = strip.shape[0]
    return tl.reshape(tl.broadcast_to(strip[:, :, None], (PARTS, ROWS // 16, 16)), (PARTS, ROWS))


@triton.jit
def scales_of_group(  # type: ignore[no-untyped-def]
    c0, c1, c2, scale_range, zero_range, S: tl.constexpr, ROWS: tl.constexpr
):
    """Scales and zero points [parts, rows] of a tile's S-th group: a code of 3 bits stands below the leading one of 128
    in float32, which the range's start takes off again."""
    pairs = pairs_of_group(c0, c1, c2, c2, S, 3)
    scale_code = ((pairs << 16) | 0x43000000).to(tl.float32, bitcast=True)
    zero_code = ((pairs & 0x00070000) | 0x43000000).to(tl.float32, bitcast=True)
    scale_step, scale_start = steps_and_starts(scale_range, ROWS)
    zero_step, zero_start = steps_and_starts(zero_range, ROWS)
    return scale_code * scale_step + scale_start, zero_code * zero_step + zero_start


@triton.jit(do_not_specialize=["M"])
def spqr_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    turned_ptr,
    words_ptr,
    statistics_ptr,
    ranges_ptr,
    starts_ptr,
    columns_ptr,
    changes_ptr,
    y_ptr,
    M,
    N,
    K: tl.constexpr,
    BITS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLOTS: tl.constexpr,
    IS_ONE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BLOCK_N rows of the weight times all rows of x; tensors are [parts, rows of the weight, ...]."""
    TILES: tl.constexpr = K // 256
    STEPS: tl.constexpr = (TILES + PARTS - 1) // PARTS
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    IS_BF16: tl.constexpr = DTYPE.fp_mantissa_width == 7
    ONES: tl.constexpr = 0x43004300 if IS_BF16 else 0x64006400
    ADDED: tl.constexpr = 128.0 if IS_BF16 else 1024.0
    SET: tl.constexpr = 16 * 8  # words of a set of a strip's tile
    n, m = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    in_n, in_m = n < N, m < M
    row = tl.where(in_n, n, 0)
    at_row = (row // 16).to(tl.int64) * (TILES * BITS * SET) + row % 16 * 8
    strip = tl.program_id(0) * (BLOCK_N // 16) + tl.arange(0, BLOCK_N // 16)
    at_range = tl.where(strip * 16 < N, strip, 0).to(tl.int64) * (TILES * 32)
    first, word, column = tl.arange(0, PARTS) * STEPS, tl.arange(0, 8), tl.arange(0, 16)
    start, stop = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    most = tl.max(stop - start, 0)
    total = tl.zeros((PARTS, BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        here = first + step < TILES  # inputs beyond the last tile are zeros
        tile = tl.where(here, first + step, 0)
        at = words_ptr + at_row[None, :, None] + (tile * (BITS * SET))[:, None, None] + word[None, None, :]
        w0, w1 = tl.load(at), tl.load(at + SET)
        w2, w3 = w1, w1
        if BITS > 2:
            w2 = tl.load(at + 2 * SET)
        if BITS > 3:
            w3 = tl.load(at + 3 * SET)
        ones = ones_like_codes(w0, DTYPE)
        at_codes = statistics_ptr + (tile * 3)[:, None] * N + row[None, :]
        c0, c1, c2 = tl.load(at_codes), tl.load(at_codes + N), tl.load(at_codes + 2 * N)
        at_ranges = ranges_ptr + at_range[None, :] + (tile * 32)[:, None]
        for s in tl.static_range(16):
            scale_range, zero_range = tl.load(at_ranges + 2 * s), tl.load(at_ranges + 2 * s + 1)
            scale, zero = scales_of_group(c0, c1, c2, scale_range, zero_range, s, BLOCK_N)
            k = tile[:, None] * 256 + s * 16 + column[None, :]
            inside = here[:, None, None] & in_m[None, None, :]
            x = tl.load(x_ptr + m[None, None, :] * K + k[:, :, None], mask=inside, other=0.0)
            code = halves(pairs_of_group(w0, w1, w2, w3, s, BITS) | ONES, DTYPE)
            found = tl.dot(code, x)
            sums = tl.dot(ones, x)
            total += (found - sums * (zero + ADDED)[:, :, None]) * scale[:, :, None]
    y = tl.sum(total, 0)
    slots = tl.arange(0, SLOTS)
    if IS_ONE:
        own = tl.zeros((BLOCK_N, SLOTS), tl.float32)
        for slot in tl.range(0, most, SLOTS):
            index = start[:, None] + (slot + slots)[None, :]
            is_there = index < stop[:, None]
            k = tl.load(columns_ptr + index, mask=is_there, other=0).to(tl.int32)
            change = tl.load(changes_ptr + index, mask=is_there, other=0.0).to(tl.float32)
            own += tl.load(turned_ptr + k).to(tl.float32) * change
        y += tl.where(m[None, :] == 0, tl.sum(own, 1)[:, None], 0.0)
    else:
        all_own = tl.zeros((BLOCK_N, SLOTS, BLOCK_M), tl.float32)
        for slot in tl.range(0, most, SLOTS):
            index = start[:, None] + (slot + slots)[None, :]
            is_there = index < stop[:, None]
            k = tl.load(columns_ptr + index, mask=is_there, other=0).to(tl.int32)
            change = tl.load(changes_ptr + index, mask=is_there, other=0.0).to(tl.float32)
            x = tl.load(turned_ptr + k[:, :, None] * BLOCK_M + m[None, None, :]).to(tl.float32)
            all_own += x * change[:, :, None]
        y += tl.sum(all_own, 1)
    tl.store(y_ptr + m[None, :] * N + n[:, None], y.to(y_ptr.dtype.element_ty), mask=in_m[None, :] & in_n[:, None])


@triton.jit(do_not_specialize=["M"])
def turn_kernel(x_ptr, turned_ptr, M, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """x [M, K] as [K, BLOCK_M], zeros beyond M: an outlier's inputs of all rows are then contiguous."""
    m, k = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + m[None, :] * K + k[:, None], mask=(m < M)[None, :] & (k < K)[:, None], other=0.0)
    tl.store(turned_ptr + k[:, None] * BLOCK_M + m[None, :], x, mask=(k < K)[:, None])


@triton.jit
def expand_spqr_kernel(  # type: ignore[no-untyped-def]
    words_ptr,
    statistics_ptr,
    ranges_ptr,
    weight_ptr,
    N,
    K: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A tile of BLOCK_N rows."""
    SET: tl.constexpr = 16 * 8
    TILES: tl.constexpr = K // 256
    tile, n = tl.program_id(0), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    word, column, in_n = tl.arange(0, 8), tl.arange(0, 16), n < N
    row = tl.where(in_n, n, 0)
    at_row = (row // 16).to(tl.int64) * (TILES * BITS * SET) + row % 16 * 8 + tile * (BITS * SET)
    at = words_ptr + at_row[:, None] + word[None, :]
    w0, w1 = tl.load(at), tl.load(at + SET)
    w2, w3 = w1, w1
    if BITS > 2:
        w2 = tl.load(at + 2 * SET)
    if BITS > 3:
        w3 = tl.load(at + 3 * SET)
    at_codes = statistics_ptr + tile * 3 * N + row[None, :]
    c0, c1, c2 = tl.load(at_codes), tl.load(at_codes + N), tl.load(at_codes + 2 * N)
    strip = tl.program_id(1) * (BLOCK_N // 16) + tl.arange(0, BLOCK_N // 16)
    at_ranges = ranges_ptr + (tl.where(strip * 16 < N, strip, 0).to(tl.int64) * (TILES * 32) + tile * 32)[None, :]
    out = weight_ptr + row.to(tl.int64)[:, None] * K + tile * 256 + column[None, :]
    for s in tl.static_range(16):
        scale_range, zero_range = tl.load(at_ranges + 2 * s), tl.load(at_ranges + 2 * s + 1)
        scale, zero = scales_of_group(c0, c1, c2, scale_range, zero_range, s, BLOCK_N)
        scale, zero = tl.reshape(scale, (BLOCK_N,)), tl.reshape(zero, (BLOCK_N,))
        code = halves(pairs_of_group(w0, w1, w2, w3, s, BITS) | 0x64006400, tl.float16).to(tl.float32) - 1024.0
        value = (code - zero[:, None]) * scale[:, None]
        tl.store(out + s * 16, value.to(weight_ptr.dtype.element_ty), mask=in_n[:, None])


@triton.jit
def place_outliers_kernel(  # type: ignore[no-untyped-def]
    starts_ptr, columns_ptr, values_ptr, weight_ptr, N, K, BLOCK_N: tl.constexpr, SLOTS: tl.constexpr
):
    """Write the outliers of BLOCK_N rows into the matrix."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = n < N
    start = tl.load(starts_ptr + n, mask=in_n, other=0)
    stop = tl.load(starts_ptr + n + 1, mask=in_n, other=0)
    most = tl.max(stop - start, 0)
    for slot in tl.range(0, most, SLOTS):
        index = start[:, None] + (slot + tl.arange(0, SLOTS))[None, :]
        is_there = index < stop[:, None]
        k = tl.load(columns_ptr + index, mask=is_there, other=0).to(tl.int64)
        value = tl.load(values_ptr + index, mask=is_there, other=0.0)
        tl.store(weight_ptr + n.to(tl.int64)[:, None] * K + k, value.to(weight_ptr.dtype.element_ty), mask=is_there)


class SpqrTiles(NamedTuple):
    """How the product is tiled: rows of the weight per program, warps that split the inputs, pipeline stages."""

    block_n: int
    parts: int
    stages: int


def row_tiles_for(M: int, K: int) -> SpqrTiles:
    """For M rows of x, as measured at 4096 × 14336 on an H200; no warp without a tile of inputs."""
    if is_interpreted():
        return SpqrTiles(block_n=16, parts=2, stages=1)
    block_n, most_parts = (16, 4) if M == 1 else (32, 8)
    return SpqrTiles(block_n=block_n, parts=min(most_parts, triton.next_power_of_2(K // TILE)), stages=1)


def launch_spqr_rows(x: Tensor, weight: SpqrTensors, tiles: SpqrTiles) -> Tensor:
    """The product of x [M, K], M up to 16, tiled as `tiles` say."""
    (M, K), N = x.shape, weight.rows
    block_m = 16 if M > 8 or is_interpreted() else 8
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    turned = x if M == 1 else torch.empty(K, block_m, device=x.device, dtype=x.dtype)
    with on_device_of(x):
        if M > 1:
            turn_kernel[(triton.cdiv(K, 128),)](x, turned, M, K, BLOCK_M=block_m, BLOCK_K=128)
        spqr_rows_kernel[(triton.cdiv(N, tiles.block_n),)](
            x,
            turned,
            weight.words,
            weight.statistics,
            weight.ranges.view(torch.int32),
            weight.starts,
            weight.columns,
            weight.changes,
            y,
            M,
            N,
            K=K,
            BITS=weight.bits,
            PARTS=tiles.parts,
            BLOCK_M=block_m,
            BLOCK_N=tiles.block_n,
            SLOTS=16 if is_interpreted() else (32 if block_m > 8 else 64),
            IS_ONE=M == 1,
            STAGES=tiles.stages,
            num_warps=4 if is_interpreted() else tiles.parts,
        )
    return y


def _run_few(x: Tensor, *tensors: Tensor) -> Tensor:
    weight = SpqrTensors(*tensors)
    return launch_spqr_rows(x, weight, row_tiles_for(x.shape[0], weight.inputs))


def _run_expand(
    words: Tensor,
    statistics: Tensor,
    ranges: Tensor,
    starts: Tensor,
    columns: Tensor,
    values: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    N, K, block_n = words.shape[0] * STRIP_ROWS, words.shape[1] * TILE, 32
    matrix = torch.empty(N, K, device=words.device, dtype=dtype)
    with on_device_of(words):
        expand_spqr_kernel[(K // TILE, triton.cdiv(N, block_n))](
            words, statistics, ranges.view(torch.int32), matrix, N, K=K, BITS=words.shape[2], BLOCK_N=block_n
        )
        place_outliers_kernel[(triton.cdiv(N, 4),)](starts, columns, values, matrix, N, K, BLOCK_N=4, SLOTS=64)
    return matrix


TENSORS = "Tensor words, Tensor statistics, Tensor ranges, Tensor starts, Tensor columns, Tensor values"
_few = operator(
    f"spqr_rows(Tensor x, {TENSORS}, Tensor changes) -> Tensor",
    _run_few,
    lambda x, words, *rest: x.new_empty(x.shape[0], words.shape[0] * STRIP_ROWS),
)
_expand = operator(
    f"expand_spqr({TENSORS}, ScalarType dtype) -> Tensor",
    _run_expand,
    lambda words, *rest: words.new_empty(words.shape[0] * STRIP_ROWS, words.shape[1] * TILE, dtype=rest[-1]),
)
