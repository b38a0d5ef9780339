"""Gradients of flash attention: two kernels that each recompute the scores they need.

With P = softmax(S), O = P V and δ_i = Σ_d O_id ∂O_id:
    ∂V = Pᵀ ∂O,   ∂S_ij = P_ij (∂O_i · V_j − δ_i) · (1 − tanh²),   ∂K = scale ∂Sᵀ Q,   ∂Q = scale ∂S K
One kernel holds a block of keys and walks over the queries that see it, of every head in its group; the other holds a
block of queries and walks over the keys they see. Seven products instead of the five of a single kernel, whose ∂Q
would have to be summed by atomic additions, in an order that differs from run to run.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tightfit.kernels.flash_blocks import (
    Blocks,
    Problem,
    capability,
    first_key,
    load_rows,
    passes,
    softcapped_scores,
    store_rows,
)
from tightfit.kernels.triton_support import tl, triton

ROWS_OF_DELTAS = 64


@dataclass(frozen=True)
class Given:
    """What both kernels read."""

    query: Tensor
    key: Tensor
    value: Tensor
    d_out: Tensor
    logs: Tensor
    deltas: Tensor
    problem: Problem

    def launch(self, kernel: Any, grid: tuple[int, int], made: tuple[Tensor, ...], blocks: Blocks) -> None:
        """Run `kernel` to write gradients into `made`."""
        read, problem = (self.query, self.key, self.value, self.d_out), self.problem
        (_, heads, queries, _), (kv_heads, keys) = self.query.shape, self.key.shape[1:3]
        kernel[grid](
            *read, self.logs, self.deltas, self.logs if problem.bounds is None else problem.bounds, *made,
            *(stride for x in (*read, *made) for stride in x.stride()[:3]),
            heads, heads // kv_heads, queries, keys, problem.window, problem.scale, *problem.factors(),
            **problem.constants(self.query), BLOCK_Q=blocks.queries, BLOCK_K=blocks.keys,
            num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip


def attend_backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logs: Tensor, problem: Problem,
    made: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Write the gradients of query, key and value into `made`."""
    d_query, d_key, d_value = made
    blocks = passes(query.shape[3], query.dtype, capability(query.device))
    given = Given(query, key, value, d_out, logs, _deltas(out, d_out), problem)
    write_key_gradients(given, d_key, d_value, blocks.key_gradients)
    write_query_gradients(given, d_query, blocks.query_gradients)


def write_key_gradients(given: Given, d_key: Tensor, d_value: Tensor, blocks: Blocks) -> None:
    """∂K and ∂V."""
    B, kv_heads, keys, _ = d_key.shape
    given.launch(key_gradient_kernel, (B * kv_heads, triton.cdiv(keys, blocks.keys)), (d_key, d_value), blocks)


def write_query_gradients(given: Given, d_query: Tensor, blocks: Blocks) -> None:
    """∂Q."""
    B, heads, queries, _ = d_query.shape
    given.launch(query_gradient_kernel, (B * heads, triton.cdiv(queries, blocks.queries)), (d_query,), blocks)


def _deltas(out: Tensor, d_out: Tensor) -> Tensor:
    B, heads, queries, D = out.shape
    deltas = torch.empty(B, heads, queries, device=out.device, dtype=torch.float32)
    delta_kernel[(B * heads, triton.cdiv(queries, ROWS_OF_DELTAS))](
        out, d_out, deltas, *out.stride()[:3], *d_out.stride()[:3], heads, queries,
        D=D, BLOCK_D=max(16, triton.next_power_of_2(D)), BLOCK_Q=ROWS_OF_DELTAS,
    )  # fmt: skip
    return deltas


@triton.jit(do_not_specialize=["heads", "queries"])
def delta_kernel(  # type: ignore[no-untyped-def]
    out, d_out, deltas, o_batch, o_head, o_row, g_batch, g_head, g_row, heads, queries,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """δ_i = O_i · ∂O_i."""
    batch, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    rows, columns = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    o = load_rows(out + batch * o_batch + head * o_head, o_row, rows, queries, columns, D, BLOCK_D, True)
    g = load_rows(d_out + batch * g_batch + head * g_head, g_row, rows, queries, columns, D, BLOCK_D, True)
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    tl.store(deltas + (batch * heads + head) * queries + rows, delta, mask=rows < queries)


@triton.jit
def _walk_queries(  # type: ignore[no-untyped-def]
    d_k, d_v, k, v, q_base, g_base, log_base, delta_base, q_head, q_stride, g_head, g_stride, at_keys, starts, window,
    before, begin, end, group, queries, inner, outer,
    HAS_BOUNDS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Query blocks from `begin` to `end` of every head in the group, in one loop: nested ones spilled registers.
    Everything is transposed, [keys, queries]. Rows beyond the last query have an infinite denominator, zero weights."""
    columns = tl.arange(0, BLOCK_D)
    blocks = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_Q)
    for step in range(group * blocks):
        member = step // blocks
        rows = begin + (step % blocks) * BLOCK_Q + tl.arange(0, BLOCK_Q)
        q = load_rows(q_base + member * q_head, q_stride, rows, queries, columns, D, BLOCK_D, True)
        log = tl.load(log_base + member * queries + rows, mask=rows < queries, other=float("inf"))
        delta = tl.load(delta_base + member * queries + rows, mask=rows < queries, other=0.0)
        scores, tanh = softcapped_scores(tl.dot(k, q.T, input_precision=PRECISION), inner, outer, HAS_SOFTCAP)
        weights = tl.exp2(scores - log[None, :])
        if MASKED:
            positions = tl.minimum(rows, queries - 1) + before
            first = first_key(positions, starts, window, HAS_BOUNDS, HAS_WINDOW)
            seen = (at_keys[:, None] <= positions[None, :]) & (at_keys[:, None] >= first[None, :])
            weights = tl.where(seen, weights, 0.0)
        g = load_rows(g_base + member * g_head, g_stride, rows, queries, columns, D, BLOCK_D, True)
        d_v = tl.dot(weights.to(g.dtype), g, d_v, input_precision=PRECISION)
        d_scores = weights * (tl.dot(v, g.T, input_precision=PRECISION) - delta[None, :])
        if HAS_SOFTCAP:
            d_scores *= 1.0 - tanh * tanh
        d_k = tl.dot(d_scores.to(q.dtype), q, d_k, input_precision=PRECISION)
    return d_k, d_v


@triton.jit(do_not_specialize=["heads", "group", "queries", "keys", "window"])
def key_gradient_kernel(  # type: ignore[no-untyped-def]
    query, key, value, d_out, logs, deltas, bounds, d_key, d_value,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    heads, group, queries, keys, window, scale, inner, outer,
    HAS_BOUNDS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """∂K and ∂V of one block of keys; the first blocks, which most queries see, are started first."""
    kv_heads = heads // group
    batch, kv_head = (tl.program_id(0) // kv_heads).to(tl.int64), tl.program_id(0) % kv_heads
    start = tl.program_id(1) * BLOCK_K
    at, columns = start + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    k = load_rows(key + batch * k_batch + kv_head * k_head, k_row, at, keys, columns, D, BLOCK_D, True)
    v = load_rows(value + batch * v_batch + kv_head * v_head, v_row, at, keys, columns, D, BLOCK_D, True)
    before, last = keys - queries, tl.minimum(start + BLOCK_K, keys) - 1
    starts = bounds + batch * keys
    sees_all_to, end = queries, queries
    if HAS_BOUNDS:
        ends = starts + (tl.num_programs(0) // kv_heads).to(tl.int64) * keys
        sees_all_to, end = tl.load(ends + start) - before, tl.load(ends + last) - before
    if HAS_WINDOW:
        sees_all_to, end = tl.minimum(sees_all_to, start + window - before), tl.minimum(end, last + window - before)
    end = tl.minimum(end, queries)
    begin = tl.maximum(start - before, 0) // BLOCK_Q * BLOCK_Q
    sees_all_from = tl.cdiv(tl.maximum(start + BLOCK_K - 1 - before, 0), BLOCK_Q) * BLOCK_Q
    if HAS_BOUNDS or HAS_WINDOW:
        sees_all_to = tl.minimum(sees_all_to, queries) // BLOCK_Q * BLOCK_Q

    head = kv_head * group
    q_base, g_base = query + batch * q_batch + head * q_head, d_out + batch * g_batch + head * g_head
    log_base, delta_base = logs + (batch * heads + head) * queries, deltas + (batch * heads + head) * queries
    d_k, d_v = tl.zeros([BLOCK_K, BLOCK_D], tl.float32), tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    d_k, d_v = _walk_queries(
        d_k, d_v, k, v, q_base, g_base, log_base, delta_base, q_head, q_row, g_head, g_row, at, starts, window,
        before, begin, tl.minimum(sees_all_from, end), group, queries, inner, outer,
        HAS_BOUNDS, HAS_WINDOW, HAS_SOFTCAP, D, BLOCK_D, PRECISION, BLOCK_Q, True,
    )  # fmt: skip
    d_k, d_v = _walk_queries(
        d_k, d_v, k, v, q_base, g_base, log_base, delta_base, q_head, q_row, g_head, g_row, at, starts, window,
        before, sees_all_from, sees_all_to, group, queries, inner, outer,
        HAS_BOUNDS, HAS_WINDOW, HAS_SOFTCAP, D, BLOCK_D, PRECISION, BLOCK_Q, False,
    )  # fmt: skip
    if HAS_BOUNDS or HAS_WINDOW:
        d_k, d_v = _walk_queries(
            d_k, d_v, k, v, q_base, g_base, log_base, delta_base, q_head, q_row, g_head, g_row, at, starts, window,
            before, tl.maximum(sees_all_from, sees_all_to), end, group, queries, inner, outer,
            HAS_BOUNDS, HAS_WINDOW, HAS_SOFTCAP, D, BLOCK_D, PRECISION, BLOCK_Q, True,
        )  # fmt: skip
    store_rows(d_key + batch * dk_batch + kv_head * dk_head, dk_row, at, keys, columns, d_k * scale, D)
    store_rows(d_value + batch * dv_batch + kv_head * dv_head, dv_row, at, keys, columns, d_v, D)


@triton.jit
def _walk_keys(  # type: ignore[no-untyped-def]
    d_q, q, g, log, delta, k_base, v_base, k_stride, v_stride, positions, first, begin, end, keys, inner, outer,
    HAS_SOFTCAP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Key blocks from `begin` to `end`."""
    columns = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        k = load_rows(k_base, k_stride, at, keys, columns, D, BLOCK_D, MASKED)
        v = load_rows(v_base, v_stride, at, keys, columns, D, BLOCK_D, MASKED)
        scores, tanh = softcapped_scores(tl.dot(q, k.T, input_precision=PRECISION), inner, outer, HAS_SOFTCAP)
        weights = tl.exp2(scores - log[:, None])
        if MASKED:
            seen = (at[None, :] <= positions[:, None]) & (at[None, :] >= first[:, None])
            weights = tl.where(seen, weights, 0.0)
        d_scores = weights * (tl.dot(g, v.T, input_precision=PRECISION) - delta[:, None])
        if HAS_SOFTCAP:
            d_scores *= 1.0 - tanh * tanh
        d_q = tl.dot(d_scores.to(k.dtype), k, d_q, input_precision=PRECISION)
    return d_q


@triton.jit(do_not_specialize=["heads", "group", "queries", "keys", "window"])
def query_gradient_kernel(  # type: ignore[no-untyped-def]
    query, key, value, d_out, logs, deltas, bounds, d_query,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    dq_batch, dq_head, dq_row,
    heads, group, queries, keys, window, scale, inner, outer,
    HAS_BOUNDS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """∂Q of one block of queries, over the same key blocks as forward."""
    batch, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_Q
    rows, columns = start + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    q = load_rows(query + batch * q_batch + head * q_head, q_row, rows, queries, columns, D, BLOCK_D, True)
    g = load_rows(d_out + batch * g_batch + head * g_head, g_row, rows, queries, columns, D, BLOCK_D, True)
    row = (batch * heads + head) * queries
    log = tl.load(logs + row + rows, mask=rows < queries, other=float("inf"))
    delta = tl.load(deltas + row + rows, mask=rows < queries, other=0.0)
    k_base = key + batch * k_batch + (head // group) * k_head
    v_base = value + batch * v_batch + (head // group) * v_head
    before = keys - queries
    last = tl.minimum(start + BLOCK_Q, queries) - 1 + before
    positions, starts = rows + before, bounds + batch * keys
    first = first_key(tl.minimum(positions, last), starts, window, HAS_BOUNDS, HAS_WINDOW)

    d_q = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    seen_by_all_from = 0
    if HAS_BOUNDS or HAS_WINDOW:
        lowest = tl.maximum(first_key(start + before, starts, window, HAS_BOUNDS, HAS_WINDOW), 0)
        seen_by_all_from = (
            tl.cdiv(tl.maximum(first_key(last, starts, window, HAS_BOUNDS, HAS_WINDOW), 0), BLOCK_K) * BLOCK_K
        )
        d_q = _walk_keys(
            d_q, q, g, log, delta, k_base, v_base, k_row, v_row, positions, first,
            lowest // BLOCK_K * BLOCK_K, tl.minimum(seen_by_all_from, last + 1), keys, inner, outer,
            HAS_SOFTCAP, D, BLOCK_D, PRECISION, BLOCK_K, True,
        )  # fmt: skip
    seen_by_all_to = (start + before + 1) // BLOCK_K * BLOCK_K
    d_q = _walk_keys(
        d_q, q, g, log, delta, k_base, v_base, k_row, v_row, positions, first,
        seen_by_all_from, seen_by_all_to, keys, inner, outer,
        HAS_SOFTCAP, D, BLOCK_D, PRECISION, BLOCK_K, False,
    )  # fmt: skip
    d_q = _walk_keys(
        d_q, q, g, log, delta, k_base, v_base, k_row, v_row, positions, first,
        tl.maximum(seen_by_all_from, seen_by_all_to), last + 1, keys, inner, outer,
        HAS_SOFTCAP, D, BLOCK_D, PRECISION, BLOCK_K, True,
    )  # fmt: skip
    store_rows(d_query + batch * dq_batch + head * dq_head, dq_row, rows, queries, columns, d_q * scale, D)
