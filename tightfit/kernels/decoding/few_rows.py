"""x · Wᵀ for 2 to 64 tokens and a weight of 16-bit floats: products of decoding many sequences.

    y = act(x · Wᵀ + b)        x [M, K], W [N, K] → y [M, N];  gated: W is gate over up [2N, K], y = act(g) · u

Such a product should take as long as reading the weight at full memory bandwidth. Two things stand in the way:

- Every block of the weight is multiplied by all tokens, which are read from the L2 cache each time. So a block has 128
  rows, or 64 where the weight has too few for all multiprocessors; the weight is the left factor, and tokens are padded
  to 16, 32 or 64 only. Blocks have many inputs and are loaded far ahead: a program for 64 rows on every second
  multiprocessor reads at most of the bandwidth, so inputs need not be split among programs (split-K).
- Memory is idle while one kernel ends and the next begins. With `overlap` (kernels/overlap.py) a program prefetches its
  first weights into the L2 cache before it waits for its input, and lets the next kernel begin after its own last load.

How a product is tiled depends on the number of tokens, so the bits of a token's row may too.

Blocks are loaded by the tensor memory accelerator (TMA, Hopper and later). TMA reads zeros outside the matrices, so
sizes need not be multiples of anything but 16 bytes a row.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.kernels.mlp.glu import activated, factored, glu_eager
from tightfit.kernels.operators import multiprocessors, on_device_of, operator, shared_bytes
from tightfit.kernels.overlap import can_overlap, launch_next, pdl, wait_for_previous
from tightfit.kernels.triton_support import HAS_TRITON, is_interpreted, tl, triton, use_triton
from tightfit.models.spec import Activation

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor

FEWEST_ROWS, MOST_ROWS = 2, 64
LEAST_OUTPUTS = 3072
"""Tokens and rows of the weight for which this is faster than cuBLAS."""
TALL = 16_384
"""Rows of a weight of which a program takes 128; of shorter ones it takes 64, so that there are more programs."""
ALIGNMENT_BYTES = 16
STAGED_BYTES = 200 * 2**10
"""Shared memory of a multiprocessor for blocks that its one or two programs load ahead."""
EARLY_BYTES = 512
"""Bytes of each row that are prefetched before the previous kernel has ended."""


class FewTile(NamedTuple):
    """Rows of the weight per program, those of gate and up together; inputs of a block, and blocks loaded ahead."""

    outputs: int
    inputs: int
    stages: int


def few_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Activation | Literal[""] = "",
    *,
    overlap: bool = False,
) -> Tensor:
    """y [M, N] of x [M, K]; with `activation`, weight and bias are gate over up, [2N, K] and [2N]."""
    return _few_rows(x, weight, bias, activation, overlap)


def few_rows_eager(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation | Literal[""] = ""
) -> Tensor:
    """The reference: product, then activation."""
    y = F.linear(x, weight, bias)
    if not activation:
        return y
    gate, up = y.chunk(2, dim=-1)
    return glu_eager(gate, up, activation)


def takes_few_rows(x: Tensor, weight: Tensor) -> bool:
    """Whether this kernel is faster than cuBLAS: few tokens, a tall 16-bit weight, aligned rows, Hopper or later."""
    if not (use_triton("auto", x) and FEWEST_ROWS <= len(x) <= MOST_ROWS and can_overlap(weight.device)):
        return False
    if not has_room(weight.device):
        return False
    is_16_bits = x.dtype == weight.dtype and x.element_size() == 2
    return is_16_bits and len(weight) >= LEAST_OUTPUTS and _is_aligned(x) and _is_aligned(weight)


def has_room(device: torch.device) -> bool:
    """Whether a program can have STAGED_BYTES of shared memory: GeForce and workstation cards have half as much."""
    return device.type != "cuda" or shared_bytes(device) > STAGED_BYTES


def _is_aligned(x: Tensor) -> bool:
    """Rows lie one after the other, each on a boundary of 16 bytes."""
    return x.is_contiguous() and not (x.data_ptr() | x.shape[1] * x.element_size()) % ALIGNMENT_BYTES


@triton.jit
def ask_early(rows_ptr):  # type: ignore[no-untyped-def]
    """Prefetch the first EARLY_BYTES behind each pointer into the L2 cache."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 512; mov.u32 $0, 0;",
        "=r,l",
        [rows_ptr.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["M"])
def few_rows_kernel(  # type: ignore[no-untyped-def]
    x_blocks,
    w_blocks,
    weight_ptr,
    bias_ptr,
    y_ptr,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    ASKS_EARLY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BLOCK_N outputs of all tokens; sums are [outputs, tokens]."""
    first = tl.program_id(0) * BLOCK_N
    n, m = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    if ASKS_EARLY:
        rows = weight_ptr + tl.minimum(n, N - 1).to(tl.int64) * K
        ask_early(rows)
        if ACTIVATION != "":
            ask_early(rows + N * K)
    wait_for_previous(OVERLAP)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    total_up = total
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        x = x_blocks.load([0, k])
        total = tl.dot(w_blocks.load([first, k]), x.T, total, input_precision="ieee")
        if ACTIVATION != "":
            total_up = tl.dot(w_blocks.load([N + first, k]), x.T, total_up, input_precision="ieee")
    launch_next(OVERLAP)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if ACTIVATION != "":
        if HAS_BIAS:
            total_up += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        gate, _ = activated(total, ACTIVATION)
        factor, _ = factored(total_up, ACTIVATION)
        total = gate * factor
    here = (n < N)[:, None] & (m < M)[None, :]
    tl.store(y_ptr + m[None, :] * N + n[:, None], total.to(y_ptr.dtype.element_ty), mask=here)


def tile_for(block_m: int, outputs: int, item: int, device: torch.device) -> FewTile:
    """The tile for a weight of so many rows, as measured for Llama's 8B on an H200 (docs/LOG.md)."""
    if is_interpreted():
        return FewTile(32, 16, 2)
    if outputs >= TALL:
        rows, inputs = 128, 128
        staged = STAGED_BYTES if triton.cdiv(outputs, rows) <= multiprocessors(device) else STAGED_BYTES // 2
    else:
        rows, inputs, staged = 64, 256 if block_m <= 32 else 128, STAGED_BYTES
    return FewTile(rows, inputs, max(2, staged // ((rows + block_m) * inputs * item)))


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation | Literal[""],
    overlap: bool,
    tile: FewTile | None = None,
) -> Tensor:
    (M, K), halves = x.shape, 2 if activation else 1
    N, block_m, item = weight.shape[0] // halves, max(16, triton.next_power_of_2(M)), x.element_size()
    tile = tile or tile_for(block_m, weight.shape[0], item, x.device)
    block_n = tile.outputs // halves
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    with on_device_of(x):
        few_rows_kernel[(triton.cdiv(N, block_n),)](
            blocks_of(x, block_m, tile.inputs),
            blocks_of(weight, block_n, tile.inputs),
            weight,
            bias,
            y,
            M,
            N=N,
            K=K,
            HAS_BIAS=bias is not None,
            ACTIVATION=activation,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=tile.inputs,
            STAGES=tile.stages,
            ASKS_EARLY=overlap and K * item >= EARLY_BYTES,
            OVERLAP=overlap,
            num_warps=4,
            **pdl(overlap),
        )
    return y


def blocks_of(matrix: Tensor, rows: int, columns: int) -> Any:
    """The TMA descriptor for blocks of a matrix."""
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], [rows, columns])


_few_rows = operator(
    "few_rows(Tensor x, Tensor weight, Tensor? bias, str activation, bool overlap) -> Tensor",
    _run,
    lambda x, weight, bias, activation, overlap: x.new_empty(x.shape[0], weight.shape[0] // (2 if activation else 1)),
)
