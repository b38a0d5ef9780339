"""Flash attention (Dao et al. 2022, 2023) in Triton, with sliding windows, packed documents and soft caps.

Query i attends to the keys of one interval, [first_i, i]: causality gives the end; a sliding window, the token's packed
document, or both give the start. Documents come as bounds [2, B, T]: start and end of every token's document. Scores
are capped where asked, s = cap · tanh(scale q·k / cap); heads share keys and values in groups without copies. A program
holds one block of queries and walks over key blocks, keeping per row the running maximum and sum that make the softmax
exact. Blocks wholly outside the intervals are never loaded; those wholly inside take a loop without masks. Scores are
kept in powers of two (exp2 is what the hardware has). Backward (flash_attention_backward.py) recomputes the scores
twice, once per kernel, and so needs no atomic additions: results are the same every time. Neither asynchronous copies
nor bf16 are needed, so it also runs where FlashAttention-2 does not (T4). Limits: causal only; head sizes up to 256,
padded to a power of two inside; no second derivatives.
"""

from typing import Any

import torch
from torch import Tensor

from tightfit.errors import UserError
from tightfit.kernels.attention.flash_attention_backward import attend_backward
from tightfit.kernels.attention.flash_blocks import (
    Blocks,
    Problem,
    capability,
    first_key,
    load_rows,
    passes,
    softcapped_scores,
    store_rows,
)
from tightfit.kernels.operators import below_autograd, on_device_of, operator
from tightfit.kernels.triton_support import tl, triton

LARGEST_HEAD = 256


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    bounds: Tensor | None = None,
) -> Tensor:
    """softmax(cap(scale · QKᵀ)) V of query [B, heads, Tq, D] over key, value [B, kv_heads, Tk, D], causally aligned at
    the end, in a window of `window` keys and inside the documents `bounds` int32 [2, B, T] gives starts and ends of."""
    _check(query, key, value, bounds)
    return _attend(query, key, value, bounds, scale, window or 0, softcap or 0.0)[0]


def _check(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor | None) -> None:
    (B, heads, queries, D), (kv_B, kv_heads, keys, kv_D) = query.shape, key.shape
    if key.shape != value.shape or (kv_B, kv_D) != (B, D) or heads % kv_heads or queries > keys:
        raise UserError(
            f"query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} do not fit: heads must be "
            "a multiple of key heads, keys at least as many as queries, and all else equal"
        )
    if D > LARGEST_HEAD:
        raise UserError(f"heads have {D} channels; this kernel takes up to {LARGEST_HEAD}, use impl='sdpa'")
    if bounds is not None and (queries != keys or bounds.shape != (2, B, keys)):
        raise UserError(
            f"document bounds are {list(bounds.shape)}, {[2, B, keys]} and as many queries as keys are needed"
        )


def _with_contiguous_heads(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def like_rows(x: Tensor) -> Tensor:
    """Uninitialized [B, heads, T, D] in the layout [B, T, heads, D], as projections make and take it."""
    B, heads, T, D = x.shape
    return x.new_empty(B, T, heads, D).transpose(1, 2)


def _run(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor | None, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    query, key, value = (_with_contiguous_heads(x) for x in (query, key, value))
    blocks = passes(query.shape[3], query.dtype, capability(query.device)).forward
    with on_device_of(query):
        return attend(query, key, value, Problem(scale, window, softcap, bounds), blocks)


def attend(query: Tensor, key: Tensor, value: Tensor, problem: Problem, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Attention, and log2 of each row's softmax denominator [B, heads, Tq]."""
    (B, heads, queries, _), (kv_heads, keys) = query.shape, key.shape[1:3]
    out = like_rows(query)
    logs = torch.empty(B, heads, queries, device=query.device, dtype=torch.float32)
    if out.numel():
        forward_kernel[(B * heads, triton.cdiv(queries, blocks.queries))](
            query,
            key,
            value,
            out,
            logs,
            *problem.starts_and_ends(logs),
            *(stride for x in (query, key, value, out) for stride in x.stride()[:3]),
            heads,
            heads // kv_heads,
            queries,
            keys,
            problem.first_position(queries, keys),
            problem.window,
            *problem.factors(),
            **problem.constants(query),
            BLOCK_Q=blocks.queries,
            BLOCK_K=blocks.keys,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
    return out, logs


def _run_backward(
    d_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logs: Tensor,
    bounds: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, d_out = (_with_contiguous_heads(x) for x in (query, key, value, d_out))
    gradients = (like_rows(query), like_rows(key), like_rows(value))
    if out.numel():
        with on_device_of(query):
            attend_backward(d_out, query, key, value, out, logs, Problem(scale, window, softcap, bounds), gradients)
    return gradients


def fake_attended(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Uninitialised output and logarithms of attention, for fake tensors."""
    return like_rows(query), query.new_empty(query.shape[:3], dtype=torch.float32)


def _fake_backward(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return like_rows(query), like_rows(key), like_rows(value)


def attend_and_save(
    ctx: Any, attend: Any, query: Tensor, key: Tensor, value: Tensor, first: Tensor | None, *settings: Any
) -> tuple[Tensor, Tensor]:
    """The forward of an autograd function: `attend` below autograd, and all that its backward needs in `ctx`."""
    with below_autograd():
        out, logs = attend(query, key, value, first, *settings)
    ctx.save_for_backward(query, key, value, out, logs, first)
    ctx.settings = settings
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(logs)
    return out, logs


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        return attend_and_save(ctx, _attend, *given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (d_out, _), (query, key, value, out, logs, bounds) = grads, ctx.saved_tensors
        if d_out is None:
            return (None,) * 7
        return *_attend_backward(d_out, query, key, value, out, logs, bounds, *ctx.settings), None, None, None, None


SETTINGS = "Tensor? bounds, float scale, int window, float softcap"
_attend_backward = operator(
    "flash_attention_backward(Tensor d_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logs, "
    f"{SETTINGS}) -> (Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)
_attend = operator(
    f"flash_attention(Tensor query, Tensor key, Tensor value, {SETTINGS}) -> (Tensor, Tensor)",
    _run,
    fake_attended,
    _FlashAttention,
)


@triton.jit
def _walk(  # type: ignore[no-untyped-def]
    acc,
    highest,
    denominator,
    q,
    k_base,
    v_base,
    k_stride,
    v_stride,
    positions,
    first,
    begin,
    end,
    keys,
    inner,
    outer,
    HAS_SOFTCAP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Key blocks from `begin` to `end`. A masked score is so low that whatever a row summed before its first real key
    is multiplied by zero when that key comes; every row has one, itself."""
    columns = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        k = load_rows(k_base, k_stride, at, keys, columns, D, BLOCK_D, MASKED)
        products = tl.dot(q, k.T, input_precision=PRECISION)
        scores, _ = softcapped_scores(products, inner, outer, HAS_SOFTCAP)
        if MASKED:
            seen = (at[None, :] <= positions[:, None]) & (at[None, :] >= first[:, None])
            scores = tl.where(seen, scores, -1.0e30)
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        denominator = denominator * shrink + tl.sum(weights, 1)
        v = load_rows(v_base, v_stride, at, keys, columns, D, BLOCK_D, MASKED)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        highest = higher
    return acc, highest, denominator


@triton.jit(do_not_specialize=["heads", "group", "queries", "keys", "before", "window"])
def forward_kernel(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    out,
    logs,
    starts,
    ends,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    o_batch,
    o_head,
    o_row,
    heads,
    group,
    queries,
    keys,
    before,
    window,
    inner,
    outer,
    HAS_BOUNDS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One block of queries of one head; the last blocks, which have the most keys to see, are started first."""
    batch, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_Q
    batch64, kv_head = batch.to(tl.int64), head // group
    rows, columns = start + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    q = load_rows(query + batch64 * q_batch + head * q_head, q_row, rows, queries, columns, D, BLOCK_D, True)
    k_base = key + batch64 * k_batch + kv_head * k_head
    v_base = value + batch64 * v_batch + kv_head * v_head
    last_row = tl.minimum(start + BLOCK_Q, queries) - 1
    last, positions = tl.minimum(last_row + before, keys - 1), tl.minimum(rows + before, keys - 1)
    starts += batch64 * queries
    first = first_key(tl.minimum(rows, last_row), before, starts, window, HAS_BOUNDS, HAS_WINDOW)

    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    highest = tl.full([BLOCK_Q], -1.0e30, tl.float32)
    denominator = tl.zeros([BLOCK_Q], tl.float32)
    seen_by_all_from = 0
    if HAS_BOUNDS or HAS_WINDOW:
        lowest = tl.maximum(first_key(start, before, starts, window, HAS_BOUNDS, HAS_WINDOW), 0)
        highest_first = tl.maximum(first_key(last_row, before, starts, window, HAS_BOUNDS, HAS_WINDOW), 0)
        seen_by_all_from = tl.cdiv(highest_first, BLOCK_K) * BLOCK_K
        acc, highest, denominator = _walk(
            acc,
            highest,
            denominator,
            q,
            k_base,
            v_base,
            k_row,
            v_row,
            positions,
            first,
            lowest // BLOCK_K * BLOCK_K,
            tl.minimum(seen_by_all_from, last + 1),
            keys,
            inner,
            outer,
            HAS_SOFTCAP,
            D,
            BLOCK_D,
            PRECISION,
            BLOCK_K,
            True,
        )
    seen_by_all_to = tl.minimum(start + before + 1, keys) // BLOCK_K * BLOCK_K
    acc, highest, denominator = _walk(
        acc,
        highest,
        denominator,
        q,
        k_base,
        v_base,
        k_row,
        v_row,
        positions,
        first,
        seen_by_all_from,
        seen_by_all_to,
        keys,
        inner,
        outer,
        HAS_SOFTCAP,
        D,
        BLOCK_D,
        PRECISION,
        BLOCK_K,
        False,
    )
    acc, highest, denominator = _walk(
        acc,
        highest,
        denominator,
        q,
        k_base,
        v_base,
        k_row,
        v_row,
        positions,
        first,
        tl.maximum(seen_by_all_from, seen_by_all_to),
        last + 1,
        keys,
        inner,
        outer,
        HAS_SOFTCAP,
        D,
        BLOCK_D,
        PRECISION,
        BLOCK_K,
        True,
    )
    divisor = tl.where(denominator > 0, denominator, 1.0)  # 0 for rows that see none of a part's keys (ring attention)
    store_rows(out + batch64 * o_batch + head * o_head, o_row, rows, queries, columns, acc / divisor[:, None], D)
    log_row = logs + (batch64 * heads + head) * queries + rows
    tl.store(log_row, highest + tl.log2(divisor), mask=rows < queries)
