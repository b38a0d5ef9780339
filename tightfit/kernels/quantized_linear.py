"""x · Wᵀ for a weight of 2, 4 or 8-bit integers in groups, read packed: a quarter of the bytes of 16 bits at 4.

    y[m, n] = Σ_g S[n, g] · Σ_{k in g} x[m, k] · (q[n, k] − Z[n, g])

Few rows (generating text) cost the reading of the weight, so a program keeps a block of words in registers and
multiplies there, without tensor cores. Turning a code into a float would be the slowest instruction of all; instead its
bits are put below the exponent of one, f = 1 + q / 2^bits, and the rest is done once per word, with X = Σ x over it:

    Σ x · (q − Z) = 2^bits · Σ x · f − (2^bits + Z) · X

Many rows cost arithmetic, for which the matrix is expanded once and multiplied by cuBLAS: expanding moves 2.5 bytes a
weight, little beside the product from a few hundred rows on.

Words are those of `kernels/packing.py`: codes along the inputs, lowest bits first. Groups must be multiples of
16 (or 0: one scale a row). Other widths and groups out of order take the plain path. Not differentiable.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.errors import UserError
from tightfit.kernels.operators import on_device_of, operator
from tightfit.kernels.packing import unpack
from tightfit.kernels.triton_support import Impl, is_interpreted, tl, triton, use_triton

BITS = (2, 4, 8)
FEW_ROWS = 8
"""Up to this many rows are multiplied in registers."""
LONGEST_STEP = 128


def quantized_linear(
    x: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group: int, *, impl: Impl = "auto"
) -> Tensor:
    """x [..., K] times the transpose of the weight in `words` [N, K · bits / 32], scale and zero [N, groups]."""
    if not (use_triton(impl, x) and can_be_fused(x.shape[-1], bits, group)):
        return quantized_linear_eager(x, words, scale, zero, bits, group)
    _check(x, words, scale, bits, group)
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) > FEW_ROWS:
        return F.linear(x, _expand(words, scale, zero, bits, group, x.dtype))
    made: Tensor = _few(rows.contiguous(), words, scale, zero, bits, group)
    return made.view(*x.shape[:-1], words.shape[0])


def quantized_linear_eager(
    x: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group: int
) -> Tensor:
    """The reference: expand, multiply."""
    return F.linear(x, expanded_eager(words, scale, zero, bits, x.shape[-1], x.dtype))


def expanded_eager(
    words: Tensor, scale: Tensor, zero: Tensor | None, bits: int, inputs: int, dtype: torch.dtype
) -> Tensor:
    """The matrix [N, K] that the codes stand for."""
    codes = unpack(words, bits, inputs).to(torch.float32).unflatten(1, (scale.shape[1], -1))
    offset = 2 ** (bits - 1) if zero is None else zero.to(torch.float32)[..., None]
    return ((codes - offset) * scale.to(torch.float32)[..., None]).flatten(1).to(dtype)


def can_be_fused(inputs: int, bits: int, group: int) -> bool:
    """Whether the kernels take such a weight."""
    return bits in BITS and inputs % (32 // bits) == 0 and (group == 0 or group % 16 == 0)


def _check(x: Tensor, words: Tensor, scale: Tensor, bits: int, group: int) -> None:
    inputs = x.shape[-1]
    groups = 1 if group == 0 else -(-inputs // group)
    if words.shape[1] * 32 // bits != inputs or tuple(scale.shape) != (words.shape[0], groups):
        raise UserError(
            f"quantized_linear got x of {inputs} inputs, words {list(words.shape)} of {bits} bits and scales "
            f"{list(scale.shape)} for groups of {group}; they do not belong together"
        )


@triton.jit
def unpacked(words, BITS: tl.constexpr, ROWS: tl.constexpr, CODES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Words [ROWS, CODES · BITS / 32] as codes [ROWS, CODES]."""
    shifts = tl.arange(0, 32 // BITS) * BITS
    return tl.reshape((words[:, :, None] >> shifts[None, None, :]) & ((1 << BITS) - 1), (ROWS, CODES))


@triton.jit
def few_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    words_ptr,
    scale_ptr,
    zero_ptr,
    y_ptr,
    M,
    N,
    K,
    groups,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """BLOCK_N outputs of all rows of x, in which the first inputs of all words come first, then all second ones, …: a
    thread that holds neighbouring words finds what it needs for each of their codes side by side."""
    PER: tl.constexpr = 32 // BITS
    m, n = tl.arange(0, ROWS), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_m, in_n = (m < M)[:, None], (n < N)[:, None]
    row = n[:, None].to(tl.int64)
    width = K // PER
    total = tl.zeros((ROWS, BLOCK_N, BLOCK_W), tl.float32)
    for start in range(0, width, BLOCK_W):
        at = start + tl.arange(0, BLOCK_W)
        here = in_n & (at < width)[None, :]
        words = tl.load(words_ptr + row * width + at[None, :], mask=here, other=0)
        group = row * groups + ((at * PER) // GROUP if GROUP > 0 else at * 0)[None, :]
        scale = tl.load(scale_ptr + group, mask=here, other=0.0).to(tl.float32)
        offset = tl.zeros((BLOCK_N, BLOCK_W), tl.float32) + ((1 << BITS) + (1 << (BITS - 1)))
        if HAS_ZERO:
            offset = tl.load(zero_ptr + group, mask=here, other=0).to(tl.float32) + (1 << BITS)
        products = tl.zeros((ROWS, BLOCK_N, BLOCK_W), tl.float32)
        sums = tl.zeros((ROWS, BLOCK_W), tl.float32)
        for j in tl.static_range(PER):
            x = tl.load(x_ptr + m[:, None] * K + j * width + at[None, :], mask=in_m & (at < width)[None, :], other=0.0)
            x = x.to(tl.float32)
            sums += x
            products += x[:, None, :] * _one_plus(words, BITS, j)[None, :, :]
        total += (products * (1 << BITS) - sums[:, None, :] * offset[None, :, :]) * scale[None, :, :]
    y = tl.sum(total, 2)
    tl.store(y_ptr + m[:, None] * N + n[None, :], y.to(y_ptr.dtype.element_ty), mask=in_m & (n < N)[None, :])


@triton.jit
def _one_plus(words, BITS: tl.constexpr, J: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 + q / 2^BITS of the J-th code of each word: its bits as the highest of a float32's fraction."""
    SHIFT: tl.constexpr = 23 - BITS - BITS * J
    MASK: tl.constexpr = ((1 << BITS) - 1) << (23 - BITS)
    moved = words << SHIFT if SHIFT >= 0 else words >> -SHIFT
    return ((moved & MASK) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def expand_kernel(  # type: ignore[no-untyped-def]
    words_ptr,
    scale_ptr,
    zero_ptr,
    weight_ptr,
    N,
    K,
    groups,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    PER: tl.constexpr = 32 // BITS
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(0) * BLOCK_K
    k = start + tl.arange(0, BLOCK_K)
    at = start // PER + tl.arange(0, BLOCK_K // PER)
    here = (n < N)[:, None] & (at * PER < K)[None, :]
    words = tl.load(words_ptr + n[:, None].to(tl.int64) * (K // PER) + at[None, :], mask=here, other=0)
    codes = unpacked(words, BITS, BLOCK_N, BLOCK_K)
    group = start // GROUP if GROUP > 0 else 0
    if HAS_ZERO:
        codes -= tl.load(zero_ptr + n * groups + group, mask=n < N, other=0).to(tl.int32)[:, None]
    else:
        codes -= 1 << (BITS - 1)
    scale = tl.load(scale_ptr + n * groups + group, mask=n < N, other=0.0).to(tl.float32)
    values = codes.to(tl.float32) * scale[:, None]
    out = weight_ptr + n[:, None].to(tl.int64) * K + k[None, :]
    tl.store(out, values.to(weight_ptr.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


def _step(group: int) -> int:
    """Inputs a program takes at a time: within one group, a power of two."""
    return LONGEST_STEP if group == 0 else min(group & -group, LONGEST_STEP)


def _run_few(x: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group: int) -> Tensor:
    (M, K), N = x.shape, words.shape[0]
    rows = triton.next_power_of_2(M)
    block_n, block_w = (8, 32) if is_interpreted() else (max(8 // rows, 1), 512)
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    by_place = x.view(M, -1, 32 // bits).transpose(1, 2).contiguous()
    with on_device_of(x):
        few_rows_kernel[(triton.cdiv(N, block_n),)](
            by_place,
            words,
            scale,
            words if zero is None else zero,
            y,
            M,
            N,
            K,
            scale.shape[1],
            BITS=bits,
            GROUP=group,
            HAS_ZERO=zero is not None,
            ROWS=rows,
            BLOCK_N=block_n,
            BLOCK_W=block_w,
            num_warps=4,
        )
    return y


def _run_expand(words: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group: int, dtype: torch.dtype) -> Tensor:
    N, K, step = words.shape[0], words.shape[1] * 32 // bits, _step(group)
    weight = torch.empty(N, K, device=words.device, dtype=dtype)
    with on_device_of(words):
        expand_kernel[(triton.cdiv(K, step), triton.cdiv(N, 32))](
            words,
            scale,
            zero if zero is not None else words,
            weight,
            N,
            K,
            scale.shape[1],
            BITS=bits,
            GROUP=group,
            HAS_ZERO=zero is not None,
            BLOCK_N=32,
            BLOCK_K=step,
            num_warps=4,
        )
    return weight


_few = operator(
    "quantized_linear(Tensor x, Tensor words, Tensor scale, Tensor? zero, int bits, int group) -> Tensor",
    _run_few,
    lambda x, words, scale, zero, bits, group: x.new_empty(x.shape[0], words.shape[0]),
)
_expand = operator(
    "expand_codes(Tensor words, Tensor scale, Tensor? zero, int bits, int group, ScalarType dtype) -> Tensor",
    _run_expand,
    lambda words, scale, zero, bits, group, dtype: words.new_empty(
        words.shape[0], words.shape[1] * 32 // bits, dtype=dtype
    ),
)
