"""Products with a weight matrix for the one to sixteen tokens of a decoding step, and what stands around them.

    y = epilogue(prologue(x) · Wᵀ + bias)        x [M, K], W [N, K], M ≤ 16

The prologue may be RMSNorm: with r = 1 / √(mean(x²) + ε), (x · r · w) · Wᵀ = r · ((x · w) · Wᵀ), so the sum of squares
is taken in the same loop and applied at the end, and no kernel of its own is needed. The epilogue may add the residual
or be a gated activation: the weight then holds gate over up, [2N, K], and y = act(g) · u.

Such a product reads every weight once and does nothing else worth counting: it is right when memory is busy from the
first microsecond to the last. One token: weights go straight to registers and are multiplied and summed there; more
tokens: the tensor cores take a tile of 16 rows. A program has few rows of W, so that there are enough programs for all
multiprocessors. With `overlap` (programmatic dependent launch, Hopper and later) a kernel starts while the one before
it ends, and asks for its first weights before it waits for its input.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.kernels.glu import ACTIVATIONS, activated
from tightfit.kernels.operators import on_device_of
from tightfit.kernels.overlap import launch_next, wait_for_previous
from tightfit.kernels.triton_support import is_interpreted, tl, triton
from tightfit.models.spec import Activation

MOST_ROWS = 16


class Tile(NamedTuple):
    """Rows of W and columns a program takes at a time, its warps, and how many tiles are loading."""

    rows: int
    cols: int
    warps: int
    stages: int


MEASURED = {
    (3072, 2048, False): Tile(4, 2048, 4, 1),
    (2048, 2048, False): Tile(4, 2048, 4, 1),
    (8192, 2048, True): Tile(2, 2048, 4, 1),
    (2048, 8192, False): Tile(4, 1024, 4, 1),
    (6144, 4096, False): Tile(4, 2048, 8, 1),
    (4096, 4096, False): Tile(2, 2048, 8, 1),
    (14_336, 4096, True): Tile(2, 2048, 8, 1),
    (4096, 14_336, False): Tile(2, 2048, 4, 1),
    (128_256, 4096, False): Tile(4, 2048, 8, 1),
}
"""The fastest for one token by (N, K, gated) on an H200, by benchmarks/decode_linear.py: Llama's 1B and 8B."""


def tile_for(M: int, N: int, K: int, element_bytes: int = 2, *, gated: bool = False) -> Tile:
    """Tiles by the shape; benchmarks/decode_linear.py times others. They fit 96 KiB of shared memory."""
    if is_interpreted():
        return Tile(16, 32, 1, 1)
    if M == 1:
        cols = 2048 if K % 2048 == 0 else 1024 if K >= 1024 else 512
        return MEASURED.get((N, K, gated), Tile(2 if gated else 4, cols, 8 if K == 4096 else 4, 1))
    return Tile(16 if N <= 16_384 else 32, 256, 4, 8 // element_bytes)


def decode_linear(
    x: Tensor,
    weight: Tensor,
    *,
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
    """y [M, N]; with `activation`, weight is gate over up [2N, K] and bias has 2N entries."""
    (M, K), width = x.shape, weight.shape[0]
    N = width if activation is None else width // 2
    assert M <= MOST_ROWS
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    out = torch.empty((M, N), device=x.device, dtype=out_dtype or x.dtype)
    chosen = tile or tile_for(M, N, K, x.element_size(), gated=activation is not None)
    kernel = _one_row_kernel if M == 1 else _rows_kernel
    options = {"launch_pdl": True} if overlap else {}
    with on_device_of(x):
        kernel[(triton.cdiv(N, chosen.rows),)](
            x,
            weight,
            x if bias is None else bias,
            x if norm is None else norm,
            x if residual is None else residual,
            out,
            M,
            x.stride(0),
            norm_eps,
            norm_offset,
            N=N,
            K=K,
            HAS_BIAS=bias is not None,
            HAS_NORM=norm is not None,
            HAS_RESIDUAL=residual is not None,
            ACTIVATION=activation or "",
            BLOCK_N=chosen.rows,
            BLOCK_K=chosen.cols,
            STAGES=chosen.stages,
            EXACT=x.dtype == torch.float32,
            OVERLAP=overlap,
            num_warps=chosen.warps,
            **options,
        )
    return out


def decode_linear_eager(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    norm_eps: float = 0.0,
    norm_offset: float = 0.0,
    residual: Tensor | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """The reference: norm, product, activation, sum."""
    if norm is not None:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm_eps)
        x = (normed * (norm.to(wide.dtype) + norm_offset)).to(x.dtype)
    y = F.linear(x, weight, bias)
    if activation is not None:
        gate, up = y.chunk(2, dim=-1)
        y = ACTIVATIONS[activation](gate) * up
    return y if residual is None else y + residual


@triton.jit
def _finished(  # type: ignore[no-untyped-def]
    y, gate_up, squares, bias, residual, out, at, rows_n, in_n, K: tl.constexpr, N: tl.constexpr, eps,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, mask,
):  # fmt: skip
    """Norm, bias, activation and residual of sums `y` (and `gate_up`, those of up), stored at `at`."""
    if HAS_NORM:
        scale = tl.rsqrt(squares / K + eps)
        y = y * scale
        gate_up = gate_up * scale
    if HAS_BIAS:
        y += tl.load(bias + rows_n, mask=in_n, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        if HAS_BIAS:
            gate_up += tl.load(bias + N + rows_n, mask=in_n, other=0.0).to(tl.float32)
        y, _ = activated(y, ACTIVATION)
        y = y * gate_up
    if HAS_RESIDUAL:
        y += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "x_row"])
def _one_row_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, norm, residual, out, M, x_row, eps, offset,
    N: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    EXACT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of one token: products kept per column until the end, then summed."""
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
    _finished(
        tl.sum(acc, 1), tl.sum(acc_up, 1), tl.sum(squares, 0), bias, residual, out, n, n, in_n, K, N, eps,
        HAS_BIAS, HAS_NORM, HAS_RESIDUAL, ACTIVATION, in_n,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M", "x_row"])
def _rows_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, norm, residual, out, M, x_row, eps, offset,
    N: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    EXACT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of up to 16 tokens."""
    launch_next(OVERLAP)
    rows, columns = tl.arange(0, 16), tl.arange(0, BLOCK_K)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_m, in_n = rows < M, n < N
    at_weight = weight + n.to(tl.int64)[:, None] * K + columns[None, :]
    wait_for_previous(OVERLAP)
    acc = tl.zeros([16, BLOCK_N], tl.float32)
    acc_up = tl.zeros([16, BLOCK_N], tl.float32)
    squares = tl.zeros([16], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        at = start + columns
        in_k = at < K
        v = tl.load(x + rows[:, None] * x_row + at[None, :], mask=in_m[:, None] & in_k[None, :], other=0.0)
        if HAS_NORM:
            wide = v.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            factor = tl.load(norm + at, mask=in_k, other=0.0).to(tl.float32) + offset
            v = (wide * factor[None, :]).to(v.dtype)
        here = in_n[:, None] & in_k[None, :]
        w = tl.load(at_weight + start, mask=here, other=0.0)
        acc = tl.dot(v, w.T, acc, input_precision="ieee" if EXACT else "tf32")
        if ACTIVATION != "":
            u = tl.load(at_weight + N * K + start, mask=here, other=0.0)
            acc_up = tl.dot(v, u.T, acc_up, input_precision="ieee" if EXACT else "tf32")
    mask = in_m[:, None] & in_n[None, :]
    _finished(
        acc, acc_up, squares[:, None], bias, residual, out, rows[:, None] * N + n[None, :], n[None, :], in_n[None, :],
        K, N, eps, HAS_BIAS, HAS_NORM, HAS_RESIDUAL, ACTIVATION, mask,
    )  # fmt: skip
