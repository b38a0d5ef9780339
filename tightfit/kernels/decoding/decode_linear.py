"""Products of a weight matrix with the one token of a decoding step, fused with the operations around them.

    y = epilogue(prologue(x) · Wᵀ + bias)        x [1, K], W [N, K]

The prologue may be RMSNorm: with r = 1 / √(mean(x²) + ε), (x · r · w) · Wᵀ = r · ((x · w) · Wᵀ), so the sum of squares
is taken in the same loop and applied at the end, without a kernel of its own. The epilogue may add the residual or be a
gated activation: the weight then holds gate over up, [2N, K], and y = act(g) · u. A weight in 8-bit floats has a scale
per row, which is applied to the row's sum.

Such a product takes as long as reading every weight once, so memory must be busy from the first microsecond to the
last. Weights go straight to registers and are multiplied and summed there. A program has few rows of W, so that there
are enough programs for all multiprocessors. With `overlap` (programmatic dependent launch, Hopper and later) a kernel
starts while the one before it ends, and loads its first weights before it waits for its input. For two tokens or more
cuBLAS is faster: a kernel of this kind on tensor cores took twice cuBLAS's time on an H200.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.kernels.mlp.glu import activated, glu_eager, refuse_changed_up
from tightfit.kernels.operators import on_device_of
from tightfit.kernels.overlap import launch_next, pdl, wait_for_previous
from tightfit.kernels.triton_support import is_interpreted, tl, triton
from tightfit.models.spec import Activation


class Tile(NamedTuple):
    """Rows of W per program, columns it takes at a time, and its warps."""

    rows: int
    cols: int
    warps: int


MEASURED = {
    (3072, 2048, False): Tile(4, 2048, 4),
    (2048, 2048, False): Tile(4, 2048, 4),
    (8192, 2048, True): Tile(2, 2048, 4),
    (2048, 8192, False): Tile(4, 1024, 4),
    (6144, 4096, False): Tile(4, 2048, 8),
    (4096, 4096, False): Tile(2, 2048, 8),
    (14_336, 4096, True): Tile(2, 2048, 8),
    (4096, 14_336, False): Tile(2, 2048, 4),
    (128_256, 4096, False): Tile(4, 2048, 8),
}
"""The fastest for one token by (N, K, gated) on an H200, by benchmarks/decode_linear.py: Llama's 1B and 8B."""


def tile_for(N: int, K: int, *, gated: bool = False) -> Tile:
    """The tile for a shape; benchmarks/decode_linear.py times others."""
    if is_interpreted():
        return Tile(16, 32, 1)
    cols = 2048 if K % 2048 == 0 else 1024 if K >= 1024 else 512
    return MEASURED.get((N, K, gated), Tile(2 if gated else 4, cols, 8 if K == 4096 else 4))


def decode_linear(
    x: Tensor,
    weight: Tensor,
    *,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    norm_eps: float = 0.0,
    norm_offset: float = 0.0,
    residual: Tensor | None = None,
    activation: Activation | None = None,
    out_dtype: torch.dtype | None = None,
    overlap: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """y [1, N]; with `activation`, weight is gate over up [2N, K], bias and scale have 2N entries."""
    refuse_changed_up(activation, "decode_linear")
    (rows, K), width = x.shape, weight.shape[0]
    N = width if activation is None else width // 2
    assert rows == 1
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    out = torch.empty((1, N), device=x.device, dtype=out_dtype or x.dtype)
    chosen = tile or tile_for(N, K, gated=activation is not None)
    with on_device_of(x):
        _kernel[(triton.cdiv(N, chosen.rows),)](
            x,
            weight,
            x if scale is None else scale,
            x if bias is None else bias,
            x if norm is None else norm,
            x if residual is None else residual,
            out,
            norm_eps,
            norm_offset,
            N=N,
            K=K,
            HAS_SCALE=scale is not None,
            HAS_BIAS=bias is not None,
            HAS_NORM=norm is not None,
            HAS_RESIDUAL=residual is not None,
            ACTIVATION=activation or "",
            BLOCK_N=chosen.rows,
            BLOCK_K=chosen.cols,
            OVERLAP=overlap,
            num_warps=chosen.warps,
            **pdl(overlap),
        )
    return out


def decode_linear_eager(
    x: Tensor,
    weight: Tensor,
    *,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    norm_eps: float = 0.0,
    norm_offset: float = 0.0,
    residual: Tensor | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """The reference: norm, product, activation, sum."""
    if scale is not None:
        weight = (weight.to(scale.dtype) * scale[:, None]).to(x.dtype)
    if norm is not None:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm_eps)
        x = (normed * (norm.to(wide.dtype) + norm_offset)).to(x.dtype)
    y = F.linear(x, weight, bias)
    if activation is not None:
        gate, up = y.chunk(2, dim=-1)
        y = glu_eager(gate, up, activation)
    return y if residual is None else y + residual


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    weight_scale,
    bias,
    norm,
    residual,
    out,
    eps,
    offset,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BLOCK_N outputs: sums per column until the end, then over columns; then norm, bias, activation and residual."""
    launch_next(OVERLAP)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    in_n = n < N
    at_weight = weight + n.to(tl.int64)[:, None] * K + columns[None, :]
    first = in_n[:, None] & (columns < K)[None, :]
    w = tl.load(at_weight, mask=first, other=0.0)
    u = w
    if ACTIVATION != "":
        u = tl.load(at_weight + N * K, mask=first, other=0.0)
    wait_for_previous(OVERLAP)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = acc
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        at = start + columns
        v = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += v * v
            v *= tl.load(norm + at, mask=at < K, other=0.0).to(tl.float32) + offset
        acc += w.to(tl.float32) * v[None, :]
        if ACTIVATION != "":
            acc_up += u.to(tl.float32) * v[None, :]
        if start + BLOCK_K < K:
            here = in_n[:, None] & (at + BLOCK_K < K)[None, :]
            w = tl.load(at_weight + start + BLOCK_K, mask=here, other=0.0)
            if ACTIVATION != "":
                u = tl.load(at_weight + N * K + start + BLOCK_K, mask=here, other=0.0)
    y, up = tl.sum(acc, 1), tl.sum(acc_up, 1)
    if HAS_SCALE:
        y *= tl.load(weight_scale + n, mask=in_n, other=0.0)
        if ACTIVATION != "":
            up *= tl.load(weight_scale + N + n, mask=in_n, other=0.0)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        y = y * scale
        up = up * scale
    if HAS_BIAS:
        y += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        if HAS_BIAS:
            up += tl.load(bias + N + n, mask=in_n, other=0.0).to(tl.float32)
        y, _ = activated(y, ACTIVATION)
        y = y * up
    if HAS_RESIDUAL:
        y += tl.load(residual + n, mask=in_n, other=0.0).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=in_n)
