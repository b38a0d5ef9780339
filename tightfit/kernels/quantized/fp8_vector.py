"""x · Wᵀ for a weight of 8-bit floats with a scale per row and one token, fused with the operations around it.

    y[n] = S[n] · Σ_w s[w] · Σ_{k in w} W[n, k] · X[k]        x[k] = s[w] · X[k], |X| < 1, s a power of two

X is in float16, with a scale s for the four inputs of each word w of codes. It holds bfloat16 inputs exactly, unless
they are 2¹⁴ times smaller than their neighbours; after a norm it is rounded to 11 bits, where a separate norm would
leave 8. Products with codes are float16, two to an instruction: 4 bits times 11, rounded to 11, and summed in pairs;
all further sums are float32. A thread has four words of every row of its program, and computes X for these once
(vector_inputs.py). The bandwidth of the L2 cache limits such a product: a program has many rows of the weight,
or it would read as many bytes of x and a norm's weights. Norm, bias, residual or gated activation:
vector_end.py.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tightfit.kernels.mlp.glu import refuse_changed_up
from tightfit.kernels.operators import on_device_of
from tightfit.kernels.overlap import launch_next, pdl, wait_for_previous
from tightfit.kernels.quantized.vector_end import finish_outputs, load_or_zeros
from tightfit.kernels.quantized.vector_inputs import inputs_of, larger_magnitude
from tightfit.kernels.triton_support import is_interpreted, tl, triton
from tightfit.models.spec import Activation

WHOLE = 16
"""Inputs that a thread takes at a time."""


class Fp8VectorTile(NamedTuple):
    """Rows of the weight per program, words of each row that it takes at a time, and its warps."""

    rows: int
    words: int
    warps: int


@triton.jit
def dot_of_four(words, first, second, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Σ of the four e4m3 numbers in each word times four float16 numbers, two each in `first` and `second`; float32."""
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
def pair_of_halves(low, high, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two floats, rounded to float16, in a word."""
    if ASM:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    low = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def pairs_of_words(ptr, first, WORDS: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """16-bit inputs (or norm weights) for the four codes of each word from `first` on: two pairs, [WORDS] each.

    A thread that has four neighbouring words loads 16 bytes twice.
    """
    QUADS: tl.constexpr = WORDS // 4
    quad = tl.arange(0, QUADS)[:, None]
    at = ptr.to(tl.pointer_type(tl.int32)) + 2 * first + 8 * quad + tl.arange(0, 4)[None, :]
    here = first + 4 * quad < COUNT
    both = tl.join(tl.load(at, mask=here, other=0), tl.load(at + 4, mask=here, other=0))
    ordered = tl.permute(tl.reshape(both, (QUADS, 2, 2, 2)), (0, 3, 1, 2))  # before: quad, word of two, pair, which two
    return tl.split(tl.reshape(ordered, (WORDS, 2)))


@triton.jit
def next_power_of_two(x):  # type: ignore[no-untyped-def]
    """The power of two above a non-negative number, at least 2⁻⁹⁹, and its inverse."""
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) >> 23, 27) + 1
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fp8_vector_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    norm_ptr,
    words_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    eps,
    N,
    K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    OVERLAP: tl.constexpr,
    ASM: tl.constexpr,
):
    """ROWS rows of the weight, WORDS words of each at a time, two blocks read ahead."""
    COUNT: tl.constexpr = K // 4
    X: tl.constexpr = x_ptr.dtype.element_ty
    NORM: tl.constexpr = norm_ptr.dtype.element_ty
    OUTPUTS: tl.constexpr = ROWS if ACTIVATION == "" else ROWS // 2
    in_block, word = tl.arange(0, ROWS), tl.arange(0, WORDS)
    n = tl.program_id(0) * OUTPUTS + in_block % OUTPUTS
    row = tl.where(n < N, n, 0) + in_block // OUTPUTS * N
    at = words_ptr + row.to(tl.int64)[:, None] * COUNT + word[None, :]
    words = tl.load(at, mask=(word < COUNT)[None, :], other=0)
    following = tl.load(at + WORDS, mask=(WORDS + word < COUNT)[None, :], other=0)
    row_scale, bias = tl.load(scale_ptr + row), load_or_zeros(bias_ptr, row, n < N, HAS_BIAS)
    norm_first, norm_second = 0, 0
    if HAS_NORM:
        norm_first, norm_second = pairs_of_words(norm_ptr, 0, WORDS, COUNT)
    launch_next(OVERLAP)
    wait_for_previous(OVERLAP)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    residual = load_or_zeros(residual_ptr, output, output < N, HAS_RESIDUAL)
    first, second = pairs_of_words(x_ptr, 0, WORDS, COUNT)
    total = tl.zeros((ROWS, WORDS // 4), tl.float32)
    squares = tl.zeros((WORDS,), tl.float32)
    for start in tl.range(0, COUNT, WORDS, num_stages=1):
        now, words = words, following
        if COUNT > 2 * WORDS:
            following = tl.load(at + (start + 2 * WORDS), mask=(start + 2 * WORDS + word < COUNT)[None, :], other=0)
        a, b, more = inputs_of(first, norm_first, X, NORM, HAS_NORM, OFFSET)
        c, d, rest = inputs_of(second, norm_second, X, NORM, HAS_NORM, OFFSET)
        squares += more + rest
        scale, inverse = next_power_of_two(tl.maximum(larger_magnitude(a, b), larger_magnitude(c, d)))
        x_first = pair_of_halves(a * inverse, b * inverse, ASM)
        x_second = pair_of_halves(c * inverse, d * inverse, ASM)
        if COUNT > WORDS:
            first, second = pairs_of_words(x_ptr, start + WORDS, WORDS, COUNT)
            if HAS_NORM:
                norm_first, norm_second = pairs_of_words(norm_ptr, start + WORDS, WORDS, COUNT)
        x_first = tl.broadcast_to(x_first[None, :], now.shape)
        x_second = tl.broadcast_to(x_second[None, :], now.shape)
        found = dot_of_four(now, x_first, x_second, ASM) * scale[None, :]
        total += tl.sum(tl.reshape(found, (ROWS, WORDS // 4, 4)), 2)
    finish_outputs(
        tl.sum(total, 1) * row_scale,
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


def fp8_vector_tile_for(rows: int, inputs: int) -> Fp8VectorTile:
    """The tile for a weight of so many rows and inputs, as measured for Llama's 8B on an H200 (docs/LOG.md)."""
    if is_interpreted():
        return Fp8VectorTile(rows=4, words=128, warps=4)
    if inputs > 8192:
        return Fp8VectorTile(rows=8, words=256, warps=4)
    return Fp8VectorTile(rows=8 if rows >= 16_384 else 16, words=512, warps=4)


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
    refuse_changed_up(activation, "fp8_vector")
    (M, K), halves = x.shape, 2 if activation else 1
    assert M == 1
    assert K % WHOLE == 0
    assert x.is_contiguous()
    assert codes.is_contiguous()
    assert norm is None or norm.dtype.itemsize == 2
    N = codes.shape[0] // halves
    y = torch.empty(1, N, device=x.device, dtype=out_dtype or x.dtype)
    chosen = tile or fp8_vector_tile_for(codes.shape[0], K)
    with on_device_of(x):
        fp8_vector_kernel[(triton.cdiv(N, chosen.rows // halves),)](
            x,
            x if norm is None else norm,
            codes.view(torch.int32),
            scale,
            x if bias is None else bias,
            x if residual is None else residual,
            y,
            norm_eps,
            N,
            K=K,
            HAS_NORM=norm is not None,
            OFFSET=norm_offset,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            ACTIVATION=activation,
            ROWS=chosen.rows,
            WORDS=chosen.words,
            OVERLAP=overlap,
            ASM=not is_interpreted(),
            num_warps=chosen.warps,
            **pdl(overlap),
        )
    return y
