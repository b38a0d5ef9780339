"""x · Wᵀ of a few tokens, 2 to 128, with a matrix of 16-bit floats: a decoding step of many sequences.

    y = act(x · Wᵀ + b)        x [M, K], W [N, K] → y [M, N];  gated: W is gate over up [2N, K], y = act(g) · u

Such a product is right when the weight is read at the memory's full rate. What stands in the way of that:

- Every block of the weight is multiplied by all tokens, which come from the L2 cache each time: M / BLOCK_N of the
  weight's bytes on top of them. At 64 tokens that is all of them again with 64 rows of the weight at a time, a quarter
  with 256. So blocks are tall, the weight is the left factor, and tokens are padded to 16, 32, 64 or 128 only.
- A card has more multiprocessors than such blocks. Programs then divide the inputs among themselves; the one that comes
  last for a block, by a counter, adds up what all have found, always in the same order, and sets the counter back to
  zero. How a product is cut does not depend on the number of tokens, so neither do the bits of a token's row.
- Memory is idle while one kernel ends and the next begins. With `overlap` (kernels/overlap.py) a program asks for the
  first of its weights, as far as the L2 cache, before it waits for its input; and it lets the next kernel begin when it
  has nothing more to ask for.

Blocks come by the tensor memory accelerator (Hopper and later), several ahead, so that nothing waits for one. What
lies outside the matrices is zero there, so sizes need not be multiples of anything but 16 bytes a row.
"""

from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.kernels.glu import activated, factored, glu_eager
from tightfit.kernels.operators import multiprocessors, on_device_of, operator
from tightfit.kernels.overlap import can_overlap, launch_next, pdl, wait_for_previous
from tightfit.kernels.quantized_linear import finish_counters
from tightfit.kernels.triton_support import HAS_TRITON, is_interpreted, tl, triton, use_triton
from tightfit.models.spec import Activation

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor

FEWEST_ROWS, MOST_ROWS = 2, 128
"""Tokens for which this is faster than cuBLAS."""
ALIGNMENT_BYTES = 16
STAGED_BYTES = 200 * 2**10
"""Of shared memory, for blocks that are read ahead."""
MOST_STAGES = 8
LEAST_SHARE = 512
"""Inputs that a program has at least."""
EARLY_PIECES = 1
"""Of 512 bytes of each row, asked for before the kernel before has ended."""


class Cut(NamedTuple):
    """Rows of the weight and inputs of a block, programs that share the inputs."""

    block_n: int
    block_k: int
    shares: int


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
    """Whether these are multiplied here: few tokens, 16 bits, Hopper or later; cuBLAS has the rest."""
    if not (use_triton("auto", x) and FEWEST_ROWS <= len(x) <= MOST_ROWS and can_overlap(weight.device)):
        return False
    is_16_bits = x.dtype == weight.dtype and x.element_size() == 2
    return is_16_bits and _is_aligned(x) and _is_aligned(weight) and torch.version.hip is None


def _is_aligned(x: Tensor) -> bool:
    """Rows lie one after the other, each on a boundary of 16 bytes."""
    return x.is_contiguous() and not (x.data_ptr() | x.shape[1] * x.element_size()) % ALIGNMENT_BYTES


@lru_cache
def cut_for(width: int, K: int, device: torch.device) -> Cut:
    """Of a weight of `width` rows, gates among them: blocks of 256 where they alone keep the card's memory busy, else
    of 128 whose inputs are shared, so that there is about one program for every multiprocessor."""
    if is_interpreted():
        return Cut(block_n=32, block_k=16, shares=2 if K > 32 else 1)
    everyone = multiprocessors(device)
    if 256 * everyone * 3 // 4 <= width:
        return Cut(block_n=256, block_k=64, shares=1)
    shares = max(1, min(everyone // triton.cdiv(width, 128), K // LEAST_SHARE))
    return Cut(block_n=128, block_k=64, shares=shares)


@triton.jit
def _ask_early(rows_ptr, PIECES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Have the first PIECES · 512 bytes behind each pointer fetched to the L2 cache."""
    at = rows_ptr.to(tl.int64)
    for piece in tl.static_range(PIECES):
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], 512; mov.u32 $0, 0;",
            "=r,l",
            [at + piece * 512],
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
    partial_ptr,
    counter_ptr,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SHARES: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BLOCK_N outputs of all tokens over one of SHARES shares of the inputs; sums are [outputs, tokens]."""
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    SIZE: tl.constexpr = BLOCK_N * BLOCK_M
    tile, share = tl.program_id(0), tl.program_id(1)
    first, last = BLOCKS * share // SHARES, BLOCKS * (share + 1) // SHARES
    row = tile * BLOCK_N
    n, m = row + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    if EARLY > 0:
        own = weight_ptr + tl.minimum(n, N - 1).to(tl.int64) * K + first * BLOCK_K
        _ask_early(own, EARLY)
        if ACTIVATION != "":
            _ask_early(own + N * K, EARLY)
    wait_for_previous(OVERLAP)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    total_up = total
    for block in tl.range(first, last, num_stages=STAGES):
        x = x_blocks.load([0, block * BLOCK_K])
        total = tl.dot(w_blocks.load([row, block * BLOCK_K]), x.T, total, input_precision="ieee")
        if ACTIVATION != "":
            total_up = tl.dot(w_blocks.load([N + row, block * BLOCK_K]), x.T, total_up, input_precision="ieee")
    launch_next(OVERLAP)
    if SHARES > 1:
        HALVES: tl.constexpr = 1 if ACTIVATION == "" else 2
        inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        of_tile = partial_ptr + tile * (SHARES * HALVES * SIZE) + inside
        tl.store(of_tile + share * (HALVES * SIZE), total)
        if ACTIVATION != "":
            tl.store(of_tile + share * (HALVES * SIZE) + SIZE, total_up)
        tl.debug_barrier()  # all of this program's sums are written before it says so
        if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") < SHARES - 1:
            return
        tl.store(counter_ptr + tile, 0)
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        total_up = total
        for other in tl.static_range(SHARES):
            total += tl.load(of_tile + other * (HALVES * SIZE), cache_modifier=".cg")
            if ACTIVATION != "":
                total_up += tl.load(of_tile + other * (HALVES * SIZE) + SIZE, cache_modifier=".cg")
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


def launch_few_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation | Literal[""],
    overlap: bool,
    cut: Cut,
    early: int = EARLY_PIECES,
) -> Tensor:
    """The product cut as `cut` says; `early` pieces of rows are asked for before the input is there."""
    (M, K), halves = x.shape, 2 if activation else 1
    N, block_n, block_m = weight.shape[0] // halves, cut.block_n // halves, max(16, triton.next_power_of_2(M))
    tiles = triton.cdiv(N, block_n)
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    partial = y
    if cut.shares > 1:
        size = tiles * cut.shares * cut.block_n * block_m
        partial = torch.empty(size, device=x.device, dtype=torch.float32)
    staged = (cut.block_n + block_m) * cut.block_k * x.element_size()
    has_early = overlap and K // cut.shares * x.element_size() >= 512 * early
    with on_device_of(x):
        few_rows_kernel[(tiles, cut.shares)](
            _blocks_of(x, block_m, cut.block_k),
            _blocks_of(weight, block_n, cut.block_k),
            weight,
            bias,
            y,
            partial,
            finish_counters(x.device),
            M,
            N=N,
            K=K,
            HAS_BIAS=bias is not None,
            ACTIVATION=activation,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=cut.block_k,
            SHARES=cut.shares,
            STAGES=1 if is_interpreted() else max(2, min(STAGED_BYTES // staged, MOST_STAGES)),
            EARLY=early if has_early else 0,
            OVERLAP=overlap,
            num_warps=4 if cut.block_n <= 128 else 8,
            **pdl(overlap),
        )
    return y


def _blocks_of(matrix: Tensor, rows: int, columns: int) -> Any:
    """What blocks of a matrix are read through."""
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], [rows, columns])


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | Literal[""], overlap: bool) -> Tensor:
    cut = cut_for(weight.shape[0], x.shape[1], x.device)
    return launch_few_rows(x, weight, bias, activation, overlap, cut)


_few_rows = operator(
    "few_rows(Tensor x, Tensor weight, Tensor? bias, str activation, bool overlap) -> Tensor",
    _run,
    lambda x, weight, bias, activation, overlap: x.new_empty(x.shape[0], weight.shape[0] // (2 if activation else 1)),
)
