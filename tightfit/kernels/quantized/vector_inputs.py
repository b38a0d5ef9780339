"""The prologue of products with one token, in packed_vector.py and fp8_vector.py: inputs and norm.

A program's threads are spread along the inputs, and each has its inputs' columns of all of the program's rows of the
weight. So a thread reads its inputs once, multiplies them by a norm's weights and converts them to the format that its
codes are multiplied by, all in registers: a kernel for that before the product would be another wait.
"""

from tightfit.kernels.triton_support import tl, triton


@triton.jit
def pair_of(words, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two 16-bit floats in each word, in float32."""
    if DTYPE.fp_mantissa_width == 7:
        return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    low = words.to(tl.int16).to(DTYPE, bitcast=True)
    high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def inputs_of(  # type: ignore[no-untyped-def]
    x, norm, X: tl.constexpr, NORM: tl.constexpr, HAS_NORM: tl.constexpr, OFFSET: tl.constexpr
):
    """Pairs of inputs x, in words of dtype X, times the norm's weights, in words of NORM; and Σ x² of each pair."""
    low, high = pair_of(x, X)
    squares = low * low + high * high
    if HAS_NORM:
        first, second = pair_of(norm, NORM)
        if OFFSET != 0:
            first, second = first + OFFSET, second + OFFSET
        low, high = low * first, high * second
    return low, high, squares


@triton.jit
def larger_magnitude(low, high):  # type: ignore[no-untyped-def]
    """The larger of two magnitudes."""
    return tl.maximum(tl.abs(low), tl.abs(high))
