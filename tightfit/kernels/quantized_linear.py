"""x · Wᵀ for a weight of 2, 4 or 8-bit integers in groups, read packed: a quarter of the bytes of 16 bits at 4.

    y[m, n] = Σ_g S[n, g] · Σ_{k in g} x[m, k] · (q[n, k] − Z[n, g])

Few rows (generating text) cost the reading of the weight, so codes are expanded in registers: the kernel multiplies by
q − Z, whole numbers that 16-bit floats hold exactly, and applies a group's scale to its sum, one multiplication per
output instead of one per weight. Where outputs are too few to fill the card, the inputs are split among programs whose
sums are added afterwards. Many rows cost arithmetic, for which the matrix is expanded once and multiplied by cuBLAS:
expanding moves 2.5 bytes a weight, little beside the product from `FUSED_ROWS` rows on.

Words are those of `kernels/packing.py`: codes along the inputs, lowest bits first. Groups must be multiples of
16 (or 0: one scale a row). Other widths and groups out of order take the plain path. Not differentiable.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.errors import UserError
from tightfit.kernels.operators import multiprocessors, on_device_of, operator
from tightfit.kernels.packing import unpack
from tightfit.kernels.triton_support import Impl, tl, triton, use_triton

BITS = (2, 4, 8)
FUSED_ROWS = 64
"""Up to this many rows the codes are expanded in registers."""
LONGEST_STEP = 128
PROGRAMS_PER_PROCESSOR = 4


def quantized_linear(
    x: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group: int, *, impl: Impl = "auto"
) -> Tensor:
    """x [..., K] times the transpose of the weight in `words` [N, K · bits / 32], scale and zero [N, groups]."""
    if not (use_triton(impl, x) and can_be_fused(x.shape[-1], bits, group)):
        return quantized_linear_eager(x, words, scale, zero, bits, group)
    _check(x, words, scale, bits, group)
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) > FUSED_ROWS:
        return F.linear(x, _expand(words, scale, zero, bits, group, x.dtype))
    made: Tensor = _fused(rows.contiguous(), words, scale, zero, bits, group)
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
def fused_kernel(  # type: ignore[no-untyped-def]
    x_ptr, words_ptr, scale_ptr, zero_ptr, y_ptr, M, N, K, span, groups,
    BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    PER: tl.constexpr = 32 // BITS
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(2) * span
    last = tl.minimum(first + span, K)
    word_rows = words_ptr + n[:, None].to(tl.int64) * (K // PER)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(first, last, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < last)[None, :], other=0.0)
        at = start // PER + tl.arange(0, BLOCK_K // PER)
        words = tl.load(word_rows + at[None, :], mask=(n < N)[:, None] & (at * PER < last)[None, :], other=0)
        codes = unpacked(words, BITS, BLOCK_N, BLOCK_K)
        group = start // GROUP if GROUP > 0 else 0
        if HAS_ZERO:
            zero = tl.load(zero_ptr + n * groups + group, mask=n < N, other=0).to(tl.int32)
            codes -= zero[:, None]
        else:
            codes -= 1 << (BITS - 1)
        part = tl.dot(x, tl.trans(codes.to(x.dtype)), input_precision="ieee")
        scale = tl.load(scale_ptr + n * groups + group, mask=n < N, other=0.0).to(tl.float32)
        total += part * scale[None, :]
    out = y_ptr + tl.program_id(2).to(tl.int64) * M * N + m[:, None] * N + n[None, :]
    tl.store(out, total.to(y_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def expand_kernel(  # type: ignore[no-untyped-def]
    words_ptr, scale_ptr, zero_ptr, weight_ptr, N, K, groups,
    BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
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


def _run_fused(x: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group: int) -> Tensor:
    (M, K), N, step = x.shape, words.shape[0], _step(group)
    block_m = min(max(triton.next_power_of_2(M), 16), 64)
    block_n = 32 if block_m <= 16 else 64
    tiles = triton.cdiv(N, block_n) * triton.cdiv(M, block_m)
    wanted = -(-PROGRAMS_PER_PROCESSOR * multiprocessors(x.device) // tiles)
    splits = max(min(wanted, 8, K // (4 * step)), 1)
    span = triton.cdiv(triton.cdiv(K, splits), step) * step
    splits = triton.cdiv(K, span)
    y = torch.empty(splits, M, N, device=x.device, dtype=x.dtype if splits == 1 else torch.float32)
    with on_device_of(x):
        fused_kernel[(triton.cdiv(N, block_n), triton.cdiv(M, block_m), splits)](
            x, words, scale, zero if zero is not None else words, y, M, N, K, span, scale.shape[1],
            BITS=bits, GROUP=group, HAS_ZERO=zero is not None, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=step,
            num_warps=4, num_stages=4,
        )  # fmt: skip
    return y[0] if splits == 1 else y.sum(0).to(x.dtype)


def _run_expand(words: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group: int, dtype: torch.dtype) -> Tensor:
    N, K, step = words.shape[0], words.shape[1] * 32 // bits, _step(group)
    weight = torch.empty(N, K, device=words.device, dtype=dtype)
    with on_device_of(words):
        expand_kernel[(triton.cdiv(K, step), triton.cdiv(N, 32))](
            words, scale, zero if zero is not None else words, weight, N, K, scale.shape[1],
            BITS=bits, GROUP=group, HAS_ZERO=zero is not None, BLOCK_N=32, BLOCK_K=step, num_warps=4,
        )  # fmt: skip
    return weight


_fused = operator(
    "quantized_linear(Tensor x, Tensor words, Tensor scale, Tensor? zero, int bits, int group) -> Tensor",
    _run_fused,
    lambda x, words, scale, zero, bits, group: x.new_empty(x.shape[0], words.shape[0]),
)
_expand = operator(
    "expand_codes(Tensor words, Tensor scale, Tensor? zero, int bits, int group, ScalarType dtype) -> Tensor",
    _run_expand,
    lambda words, scale, zero, bits, group, dtype: words.new_empty(
        words.shape[0], words.shape[1] * 32 // bits, dtype=dtype
    ),
)
