"""x · Wᵀ for a weight of 4-bit codes and some 16 to 256 rows, on Hopper: codes become floats on their way into wgmma.

    y[m, n] = Σ_g S[n, g] · Σ_{k in g} x[m, k] · (q[n, k] − Z[n, g])

The weight is the left factor, whose blocks wgmma takes from registers: a program has BLOCK_N rows of the weight and
BLOCK_M rows of x, and goes along the inputs a tile (128) at a time. Words (`packing.py`) are read as 16-bit
integers of four codes each. ldmatrix loads 16-bit integers from shared memory in the very register layout in which
wgmma takes 16-bit floats, and one shift and one `(a & b) | c` turn two codes at once into floats: a code becomes the
lowest bits of the number 128 (1024 in float16), one number in either half of a register. Four shifts give a tile's 128
inputs in their order, so threads exchange nothing and x needs no permutation.

Scales are applied in one of two places (SCALED):

    sums      to a group's sum, in float32: 3 instructions for two weights, and one for each of a tile's sums
    weights   to the weights, rounded once, as eager rounds them: 5, or 4 where scales are of the dtype of x

x, words, scales and zero points are loaded by the tensor memory accelerator (TMA), some stages ahead; so scales of a
group must be contiguous (`by_group`), outputs a multiple of 16 and inputs of 128. TMA writes to shared memory at
multiples of 128 bytes, and a tensor's stages lie one behind the other there: a program has at least 128 rows of the
weight, whose zero points take 128 bytes a stage (with 64 rows every second stage failed: "misaligned address"). Where
outputs alone give too few programs, several split the inputs (split-K); the last one to finish adds up their partial
sums, in a fixed order.
"""

from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tightfit.kernels.operators import finish_counters, multiprocessors, on_device_of, operator
from tightfit.kernels.overlap import launch_next, pdl, wait_for_previous
from tightfit.kernels.quantized.packed_rows import has_lop3
from tightfit.kernels.quantized.packing import STRIP_ROWS, has_strips
from tightfit.kernels.triton_support import HAS_TRITON, is_interpreted, tl, triton

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor

TILE = 128
"""Inputs of a tile: their codes fill 16 words of a row, read as 32 integers of 16 bits."""
BITS = 4
MOST_ROWS = 256
LEAST_OUTPUTS = 128
"""Least rows of the weight per program: a stage of its zero points, one byte each, must fill TMA's 128 bytes."""
LEAST_TILES = 4
"""Least tiles of inputs per program where several split the inputs."""
Scaled = Literal["sums", "weights"]


class Blocks(NamedTuple):
    """Rows of x and of the weight per program, programs that split the inputs, pipeline stages, warps, and where scales
    are applied."""

    block_m: int
    block_n: int
    split: int
    stages: int
    warps: int
    scaled: Scaled


RULE: dict[int, tuple[int, Scaled]] = {16: (4, "sums"), 32: (3, "sums"), 64: (4, "sums"), 128: (3, "weights")}
"""By rows of x per program: pipeline stages, and where scales are applied."""
INTERPRETED = Blocks(block_m=16, block_n=16, split=2, stages=1, warps=4, scaled="sums")


def takes_blocks(rows: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group: int) -> bool:
    """Whether this kernel takes a product of these."""
    if bits != BITS or group % TILE or rows.shape[1] % TILE or not has_strips(words.shape[0]):
        return False
    if rows.element_size() != 2 or not _is_by_group(scale):
        return False
    if zero is not None and not (zero.dtype == torch.uint8 and _is_by_group(zero)):
        return False
    is_aligned = not any(tensor.data_ptr() % 16 for tensor in (rows, words, scale, zero) if tensor is not None)
    return is_aligned and rows.is_contiguous() and words.is_contiguous() and is_hopper(rows.device)


def _is_by_group(constants: Tensor) -> bool:
    """Whether scales or zero points of a group are contiguous, every group's on a boundary of 16 bytes."""
    return constants.stride(0) == 1 and (constants.shape[1] == 1 or constants.stride(1) % 16 == 0)


@lru_cache
def is_hopper(device: torch.device) -> bool:
    """Whether the card has wgmma; in the interpreter every card does."""
    if is_interpreted():
        return True
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


@triton.jit
def codes_of_shift(integers, S: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The S-th code of every 16-bit integer as a float, plus 128 (float16: 1024); computed two to a register."""
    SHIFT: tl.constexpr = "0" if S == 0 else "4" if S == 1 else "8" if S == 2 else "12"
    ONES: tl.constexpr = "0x43004300" if DTYPE.fp_mantissa_width == 7 else "0x64006400"
    PICK: tl.constexpr = "{.reg .b32 t; shr.b32 t, $1, " + SHIFT + "; lop3.b32 $0, t, 0x000f000f, " + ONES + ", 0xea;}"
    made = tl.inline_asm_elementwise(PICK, "=r,r", [integers], dtype=tl.int16, is_pure=True, pack=2)
    return made.to(DTYPE, bitcast=True)


@triton.jit
def two_by_two(operation: tl.constexpr, left, right, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """left ∘ right of 16-bit floats, computed two to a register."""
    KIND: tl.constexpr = ".rn.bf16x2" if DTYPE.fp_mantissa_width == 7 else ".rn.f16x2"
    CODE: tl.constexpr = operation + KIND + " $0, $1, $2;"
    made = tl.inline_asm_elementwise(CODE, "=r,r,r", [left, right], dtype=tl.int16, is_pure=True, pack=2)
    return made.to(DTYPE, bitcast=True)


@triton.jit
def scaled_bf16(code, scale):  # type: ignore[no-untyped-def]
    """code · scale in bfloat16, rounded once: the 3 of the scale's 11 bits that do not fit are multiplied separately,
    exactly."""
    wide = scale.to(tl.float32)
    high = wide.to(tl.bfloat16)
    low = (wide - high.to(tl.float32)).to(tl.bfloat16)
    made = tl.inline_asm_elementwise(
        "{.reg .b32 t; mul.rn.bf16x2 t, $1, $3; fma.rn.bf16x2 $0, $1, $2, t;}",
        "=r,r,r,r",
        [code, tl.broadcast_to(high[:, None], code.shape), tl.broadcast_to(low[:, None], code.shape)],
        dtype=tl.int16,
        is_pure=True,
        pack=2,
    )
    return made.to(tl.bfloat16, bitcast=True)


@triton.jit
def weights_of_shift(  # type: ignore[no-untyped-def]
    integers, zero, scale, S: tl.constexpr, SCALED: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLED: tl.constexpr
):
    """The S-th codes of 16-bit integers [N, 32] as weights [N, 32]; without scales where those are applied to sums."""
    IS_BF16: tl.constexpr = DTYPE.primitive_bitwidth == 16 and DTYPE.fp_mantissa_width == 7
    ADDED: tl.constexpr = 128.0 if IS_BF16 else 1024.0
    if not ASSEMBLED:
        weight = ((integers >> (4 * S)) & 15).to(tl.float32) - zero[:, None]
        if SCALED == "weights":
            weight *= scale.to(tl.float32)[:, None]
        weight = weight.to(DTYPE)
    else:
        code = codes_of_shift(integers, S, DTYPE)
        weight = two_by_two("sub", code, tl.broadcast_to((zero + ADDED).to(DTYPE)[:, None], code.shape), DTYPE)
        if SCALED == "weights" and scale.dtype == DTYPE:
            weight = two_by_two("mul", weight, tl.broadcast_to(scale[:, None], code.shape), DTYPE)
        elif SCALED == "weights" and IS_BF16:
            weight = scaled_bf16(weight, scale)
        elif SCALED == "weights":
            weight = (weight.to(tl.float32) * scale.to(tl.float32)[:, None]).to(DTYPE)
    return weight


@triton.jit
def wait_for_products(sums):  # type: ignore[no-untyped-def]
    """`sums` unchanged, once their products are done. Otherwise Triton lets the next tile's products begin before these
    end, one register block at a time, and the assembler then waits after every single wgmma (its remark C7515)."""
    return tl.inline_asm_elementwise("", "=f,0", [sums], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit(do_not_specialize=["M", "split"])
def packed_blocks_kernel(  # type: ignore[no-untyped-def]
    x_blocks,
    words_blocks,
    scale_blocks,
    zero_blocks,
    y_ptr,
    partial_ptr,
    counter_ptr,
    M,
    N,
    K,
    split,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    IS_SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    OVERLAP: tl.constexpr,
    ASSEMBLED: tl.constexpr,
):
    """BLOCK_N outputs of BLOCK_M rows over one of `split` parts of the inputs."""
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    m_block, n_block, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_m, first_n = m_block * BLOCK_M, n_block * BLOCK_N
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    tiles = K // 128
    first, last = tiles * share // split, tiles * (share + 1) // split
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    wait_for_previous(OVERLAP)
    for tile in tl.range(first, last, num_stages=STAGES):
        integers = words_blocks.load([first_n // 16, tile * 16, 0]).reshape(BLOCK_N, 32)
        group = tile * 128 // GROUP if GROUP > 0 else 0
        scale = scale_blocks.load([group, first_n]).reshape(BLOCK_N)
        if HAS_ZERO:
            zero = zero_blocks.load([group, first_n]).reshape(BLOCK_N).to(tl.float32)
        else:
            zero = tl.full((BLOCK_N,), 8.0, tl.float32)
        even = tl.join(
            weights_of_shift(integers, zero, scale, 0, SCALED, DTYPE, ASSEMBLED),
            weights_of_shift(integers, zero, scale, 2, SCALED, DTYPE, ASSEMBLED),
        )
        odd = tl.join(
            weights_of_shift(integers, zero, scale, 1, SCALED, DTYPE, ASSEMBLED),
            weights_of_shift(integers, zero, scale, 3, SCALED, DTYPE, ASSEMBLED),
        )
        weights = tl.join(even, odd).permute(0, 2, 3, 1).reshape(BLOCK_N, 128)  # input = 32 · shift + place
        x = x_blocks.load([first_m, tile * 128])
        if SCALED == "sums":
            total += tl.dot(weights, x.T) * scale.to(tl.float32)[:, None]
        else:
            total = tl.dot(weights, x.T, total)
            if ASSEMBLED:
                total = wait_for_products(total)
    launch_next(OVERLAP)
    here = (m < M)[None, :] & (n < N)[:, None]
    out = m[None, :] * N + n[:, None]
    if IS_SHARED:
        tl.store(partial_ptr + share * M * N + out, total, mask=here)
        tl.debug_barrier()  # all of this program's sums are written before the counter rises
        counter = counter_ptr + m_block * tl.num_programs(1) + n_block
        if tl.atomic_add(counter, 1, sem="acq_rel") < split - 1:
            return
        tl.store(counter, 0)
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for other in range(split):
            total += tl.load(partial_ptr + other * M * N + out, mask=here, other=0.0, cache_modifier=".cg")
    tl.store(y_ptr + out, total.to(DTYPE), mask=here)


def blocks_for(M: int, N: int, K: int, processors: int) -> Blocks:
    """As measured on an H200 (benchmarks/packed_blocks.py): two programs of four warps per multiprocessor, of which one
    dequantizes while the other multiplies."""
    block_m = 16 if M <= 16 else 32 if M <= 32 else 64 if M <= 128 else 128
    stages, scaled = RULE[block_m]
    programs = -(-N // LEAST_OUTPUTS) * -(-M // block_m)
    split = max(1, min(2 * processors // programs, K // TILE // LEAST_TILES))
    return Blocks(block_m, LEAST_OUTPUTS, split, stages, warps=4, scaled=scaled)


def launch_blocks(
    x: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, group: int, blocks: Blocks, overlap: bool = False
) -> Tensor:
    """The product, tiled as `blocks` say."""
    assert blocks.block_n >= LEAST_OUTPUTS or is_interpreted(), blocks
    (M, K), N = x.shape, words.shape[0]
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    is_shared = blocks.split > 1
    partial = torch.empty(blocks.split * M * N, device=x.device, dtype=torch.float32) if is_shared else y
    strips, width = blocks.block_n // STRIP_ROWS, TILE * BITS // 16
    integers = words.view(torch.int16).view(N // STRIP_ROWS, -1, width)
    scale_blocks = _constants_of(scale, blocks.block_n)
    with on_device_of(x):
        packed_blocks_kernel[(triton.cdiv(M, blocks.block_m), triton.cdiv(N, blocks.block_n), blocks.split)](
            _blocks_of(x, [blocks.block_m, TILE]),
            _blocks_of(integers, [strips, STRIP_ROWS, width]),
            scale_blocks,
            scale_blocks if zero is None else _constants_of(zero, blocks.block_n),
            y,
            partial,
            finish_counters(x.device),
            M,
            N,
            K,
            blocks.split,
            GROUP=group,
            HAS_ZERO=zero is not None,
            IS_SHARED=is_shared,
            BLOCK_M=blocks.block_m,
            BLOCK_N=blocks.block_n,
            STAGES=blocks.stages,
            SCALED=blocks.scaled,
            OVERLAP=overlap,
            ASSEMBLED=has_lop3(),
            num_warps=blocks.warps,
            **pdl(overlap),
        )
    return y


def _blocks_of(tensor: Tensor, block: list[int]) -> Any:
    """The TMA descriptor for blocks of a tensor."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


def _constants_of(constants: Tensor, block_n: int) -> Any:
    """The TMA descriptor of scales or zero points [N, groups], for block_n of one group at a time."""
    N, groups = constants.shape
    return TensorDescriptor(constants, [groups, N], [constants.stride(1) if groups > 1 else N, 1], [1, block_n])


def _run(x: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, group: int, overlap: bool) -> Tensor:
    (M, K), N = x.shape, words.shape[0]
    blocks = INTERPRETED if is_interpreted() else blocks_for(M, N, K, multiprocessors(x.device))
    return launch_blocks(x, words, scale, zero, group, blocks, overlap)


packed_blocks = operator(
    "packed_blocks(Tensor x, Tensor words, Tensor scale, Tensor? zero, int group, bool overlap) -> Tensor",
    _run,
    lambda x, words, scale, zero, group, overlap: x.new_empty(x.shape[0], words.shape[0]),
)
