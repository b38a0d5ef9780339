"""The epilogue of products with one token, in packed_vector.py and fp8_vector.py.

RMSNorm before the product: (x · r · w) · Wᵀ = r · (x · w) · Wᵀ, so a sum is multiplied by r. Then bias and residual, or
a gated activation: the weight then holds gate over up, [2N, K], and the first half of a program's rows are gates. Bias
and residual are loaded before the product, or its last program would wait for memory once more.
"""

from tightfit.kernels.mlp.glu import activated
from tightfit.kernels.triton_support import tl, triton


@triton.jit
def load_or_zeros(ptr, at, here, IS_GIVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers at `at` in float32; zeros where there is no such tensor."""
    if IS_GIVEN:
        return tl.load(ptr + at, mask=here, other=0.0).to(tl.float32)
    return tl.zeros(at.shape, tl.float32)


@triton.jit
def finish_outputs(  # type: ignore[no-untyped-def]
    y,
    squares,
    bias,
    residual,
    y_ptr,
    n,
    eps,
    N,
    K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Store outputs n of a program whose rows of the weight have the sums y and the biases; `squares` is Σ x²."""
    if HAS_NORM:
        y *= tl.rsqrt(squares / K + eps)
    y += bias
    if ACTIVATION != "":
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, n.shape[0])), (1, 0)))
        gate, _ = activated(gate, ACTIVATION)
        y = gate * up
    y += residual
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < N)
