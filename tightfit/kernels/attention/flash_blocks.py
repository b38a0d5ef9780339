"""Shared by forward and backward of flash attention: problem description, block sizes, scores of a block.

Block sizes are rows of queries × rows of keys. They are a table, not an autotuner: that would compile for seconds at
the first call of every shape and might choose differently every time. Hopper's entries for heads of 64 and 128 are the
fastest that `benchmarks/flash_blocks.py` found on an H200 (rows in benchmarks/results); the others compile without
spilling registers and fit the shared memory, but have not been timed. Found there: two programs of four warps per
multiprocessor beat one of eight, as one multiplies while the other computes exponentials; `num_stages=2` is one buffer,
which overlaps nothing, so three stages pay where shared memory still allows two programs.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tightfit.kernels.triton_support import is_interpreted, tl, triton

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Blocks:
    """Rows of queries and of keys a program holds at a time, its warps and its pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Passes:
    """Block sizes of the three large kernels."""

    forward: Blocks
    key_gradients: Blocks
    query_gradients: Blocks


HOPPER = {
    64: Passes(Blocks(64, 64, 4, 3), Blocks(64, 64, 4, 3), Blocks(128, 64, 8, 3)),
    128: Passes(Blocks(64, 64, 4, 3), Blocks(64, 64, 4, 2), Blocks(128, 64, 8, 3)),
    256: Passes(Blocks(128, 64, 8, 2), Blocks(32, 64, 8, 2), Blocks(128, 32, 8, 2)),
}
AMPERE = {
    64: Passes(Blocks(128, 64, 4, 3), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2)),
    128: Passes(Blocks(128, 32, 4, 3), Blocks(32, 64, 4, 2), Blocks(64, 32, 4, 2)),
    256: Passes(Blocks(64, 32, 4, 2), Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1)),
}
OLDER = {
    64: Passes(Blocks(64, 32, 4, 1), Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1)),
    128: Passes(Blocks(64, 32, 4, 1), Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1)),
    256: Passes(Blocks(32, 16, 4, 1), Blocks(16, 16, 4, 1), Blocks(16, 16, 4, 1)),
}
"""T4 class: 64 KB of shared memory a program, no asynchronous copies to hide behind more stages. Float32, too."""
TINY = Passes(Blocks(16, 32, 1, 1), Blocks(32, 16, 1, 1), Blocks(16, 16, 1, 1))
"""For the interpreter, where small tests must still have several blocks of each kind."""


@lru_cache
def passes(head_dim: int, dtype: torch.dtype, major: int) -> Passes:
    """Blocks for a head size on a card of compute capability `major`; 0 is the interpreter."""
    if major == 0:
        return TINY
    table = OLDER if major < 8 or dtype == torch.float32 else AMPERE if major != 9 else HOPPER
    return table[max(64, triton.next_power_of_2(head_dim))]


@lru_cache
def capability(device: torch.device) -> int:
    """The major compute capability of the card that runs kernels on `device`."""
    return 0 if is_interpreted() else torch.cuda.get_device_capability(device)[0]


@dataclass(frozen=True)
class Problem:
    """Attention of q [B, heads, queries, D] to k, v [B, kv_heads, keys, D]."""

    scale: float
    window: int
    """Keys a query attends to at most, its own included; 0 for all."""
    softcap: float
    """0 for none."""
    bounds: Tensor | tuple[Tensor, Tensor] | None
    """The first key of every query, int32 [B, queries], and the end of the queries of every key, int32 [B, keys]; for
    packed documents start and end of every token's document, [2, B, keys]."""
    before: int | None = None
    """Query i sees keys up to i + before; None: queries are the last positions of keys."""

    def first_position(self, queries: int, keys: int) -> int:
        """`before`, or what None means for so many queries and keys: the first query's position."""
        return keys - queries if self.before is None else self.before

    def starts_and_ends(self, unused: Tensor) -> tuple[Tensor, Tensor]:
        """The two tensors of `bounds`; `unused` in their place where there are none."""
        return (unused, unused) if self.bounds is None else (self.bounds[0], self.bounds[1])

    def constants(self, query: Tensor) -> dict[str, object]:
        """The kernels' compile-time constants."""
        D = query.shape[3]
        exact = query.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
        return {
            "HAS_BOUNDS": self.bounds is not None,
            "HAS_WINDOW": self.window > 0,
            "HAS_SOFTCAP": self.softcap > 0,
            "D": D,
            "BLOCK_D": max(16, triton.next_power_of_2(D)),
            "PRECISION": "ieee" if exact else "tf32",
        }

    def constants_without_documents(self, query: Tensor) -> dict[str, object]:
        """`constants` without HAS_BOUNDS, for kernels over a paged cache, where every sequence is one document."""
        return {name: value for name, value in self.constants(query).items() if name != "HAS_BOUNDS"}

    def factors(self) -> tuple[float, float]:
        """Factors of scores inside and outside of tanh, for exp2 in place of exp; without a cap the inner alone."""
        if not self.softcap:
            return self.scale * LOG2E, 1.0
        return self.scale / self.softcap * 2 * LOG2E, self.softcap * LOG2E


@triton.jit
def softcapped_scores(products, inner, outer, HAS_SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """log2(e) · cap · tanh(scale q·k / cap), with tanh(u) = 1 − 2 / (1 + e^2u), and that tanh; or scaled products."""
    if HAS_SOFTCAP:
        tanh = 1.0 - 2.0 / (1.0 + tl.exp2(products * inner))
        return tanh * outer, tanh
    else:
        return products * inner, products


@triton.jit
def first_key(row, before, starts, window, HAS_BOUNDS: tl.constexpr, HAS_WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first key that query `row`, at position row + before, attends to."""
    first = row * 0
    if HAS_BOUNDS:
        first = tl.load(starts + row)
    if HAS_WINDOW:
        first = tl.maximum(first, row + before - window + 1)
    return first


@triton.jit
def load_rows(base, row_stride, rows, count, columns, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows × head of a matrix; 0 beyond `count` rows (where `MASKED`) and beyond the head's size."""
    at = base + rows[:, None] * row_stride + columns[None, :]
    if MASKED and D != BLOCK_D:
        return tl.load(at, mask=(rows[:, None] < count) & (columns[None, :] < D), other=0.0)
    elif MASKED:
        return tl.load(at, mask=rows[:, None] < count, other=0.0)
    elif D != BLOCK_D:
        return tl.load(at, mask=columns[None, :] < D, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def store_rows(base, row_stride, rows, count, columns, values, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write rows × head back, in the matrix's own dtype."""
    at = base + rows[:, None] * row_stride + columns[None, :]
    tl.store(at, values.to(base.dtype.element_ty), mask=(rows[:, None] < count) & (columns[None, :] < D))
