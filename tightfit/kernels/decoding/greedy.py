"""Greedy sampling: the argmax of each row of logits, also written to the table that the next step reads its input from.

torch's argmax gives a row to one multiprocessor: 37 µs for a vocabulary of 128 256 on an H200, as long as two layers of
a small model take. Here a row is divided among programs; the last to finish, by an atomic counter, compares their
maxima, writes the token and sets the counter back to zero. Of equal logits the first wins.
"""

import torch
from torch import Tensor

from tightfit.kernels.operators import on_device_of
from tightfit.kernels.triton_support import is_interpreted, tl, triton, use_triton

CHUNK = 64 if is_interpreted() else 4096


def choose_greedily(logits: Tensor, last_tokens: Tensor, slots: Tensor, counters: Tensor) -> Tensor:
    """argmax of logits [M, V], int64 [M], also written to last_tokens[slots]; counters int32 [≥ M] stay zero."""
    if not use_triton("auto", logits):
        tokens = logits.argmax(-1)
        last_tokens.index_copy_(0, slots, tokens)
        return tokens
    return launch(logits, last_tokens, slots, counters)


def launch(logits: Tensor, last_tokens: Tensor, slots: Tensor, counters: Tensor) -> Tensor:
    """`choose_greedily` by the kernel."""
    M, V = logits.shape
    chunks = triton.cdiv(V, CHUNK)
    assert logits.stride(1) == 1
    assert counters.numel() >= M
    tokens = torch.empty(M, device=logits.device, dtype=torch.int64)
    highest = torch.empty((M, chunks), device=logits.device, dtype=torch.float32)
    places = torch.empty((M, chunks), device=logits.device, dtype=torch.int32)
    with on_device_of(logits):
        _kernel[(chunks, M)](
            logits,
            highest,
            places,
            counters,
            tokens,
            last_tokens,
            slots,
            logits.stride(0),
            V,
            CHUNK=CHUNK,
            CHUNKS_2=triton.next_power_of_2(chunks),
            num_warps=1 if is_interpreted() else 8,
        )
    return tokens


@triton.jit(do_not_specialize=["row_stride"])
def _kernel(  # type: ignore[no-untyped-def]
    logits,
    highest,
    places,
    counters,
    tokens,
    last_tokens,
    slots,
    row_stride,
    V,
    CHUNK: tl.constexpr,
    CHUNKS_2: tl.constexpr,
):
    """The maximum of one chunk of one row, and in the row's last program to finish the token."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    chunks = tl.num_programs(0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * row_stride + at, mask=at < V, other=float("-inf")).to(tl.float32)
    value, place = tl.max(x, 0, return_indices=True)
    tl.store(highest + row * chunks + chunk, value)
    tl.store(places + row * chunks + chunk, chunk * CHUNK + place)
    tl.debug_barrier()  # stored before the counter rises
    if tl.atomic_add(counters + row, 1, sem="acq_rel") == chunks - 1:
        tl.store(counters + row, 0)
        each = tl.arange(0, CHUNKS_2)
        found = tl.load(highest + row * chunks + each, mask=each < chunks, other=float("-inf"), cache_modifier=".cg")
        _, best = tl.max(found, 0, return_indices=True)
        token = tl.load(places + row * chunks + best, cache_modifier=".cg").to(tl.int64)
        tl.store(tokens + row, token)
        tl.store(last_tokens + tl.load(slots + row), token)
