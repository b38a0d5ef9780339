"""What comes after the sums of a product of one token, in kernels/packed_vector.py and kernels/fp8_vector.py alike.

RMSNorm before the product: (x · r · w) · Wᵀ = r · (x · w) · Wᵀ, so a sum is multiplied by r. Then bias and residual, or
a gated activation: the weight then holds gate over up, [2N, K], and the first half of a program's rows are gates.
"""

from tightfit.kernels.glu import activated
from tightfit.kernels.triton_support import tl, triton


@triton.jit
def finish_outputs(  # type: ignore[no-untyped-def]
    y,
    row,
    squares_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    eps,
    N,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Store the outputs of a program whose rows of the weight are `row` and their sums `y`; Σ x² is in PARTS parts."""
    if HAS_NORM:
        every = tl.arange(0, MOST_PARTS)
        squares = tl.load(squares_ptr + every, mask=every < PARTS, other=0.0)
        y *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
    if HAS_BIAS:
        y += tl.load(bias_ptr + row).to(tl.float32)
    if ACTIVATION != "":
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, OUTPUTS)), (1, 0)))
        gate, _ = activated(gate, ACTIVATION)
        y = gate * up
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < N)
