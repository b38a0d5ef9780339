"""∂Q of flash attention: a program holds one block of queries and walks over the keys they attend to.

Formulas and launch: flash_attention_backward.py.
"""

from tightfit.kernels.attention.flash_blocks import first_key, load_rows, softcapped_scores, store_rows
from tightfit.kernels.triton_support import tl, triton


@triton.jit
def _walk_keys(  # type: ignore[no-untyped-def]
    d_q,
    q,
    g,
    log,
    delta,
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


@triton.jit(do_not_specialize=["heads", "group", "queries", "keys", "before", "window"])
def query_gradient_kernel(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    d_out,
    logs,
    deltas,
    starts,
    ends,
    d_query,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    g_batch,
    g_head,
    g_row,
    dq_batch,
    dq_head,
    dq_row,
    heads,
    group,
    queries,
    keys,
    before,
    window,
    scale,
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
    last_row = tl.minimum(start + BLOCK_Q, queries) - 1
    last, positions = tl.minimum(last_row + before, keys - 1), tl.minimum(rows + before, keys - 1)
    starts += batch * queries
    first = first_key(tl.minimum(rows, last_row), before, starts, window, HAS_BOUNDS, HAS_WINDOW)

    d_q = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    seen_by_all_from = 0
    if HAS_BOUNDS or HAS_WINDOW:
        lowest = tl.maximum(first_key(start, before, starts, window, HAS_BOUNDS, HAS_WINDOW), 0)
        highest_first = tl.maximum(first_key(last_row, before, starts, window, HAS_BOUNDS, HAS_WINDOW), 0)
        seen_by_all_from = tl.cdiv(highest_first, BLOCK_K) * BLOCK_K
        d_q = _walk_keys(
            d_q,
            q,
            g,
            log,
            delta,
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
    d_q = _walk_keys(
        d_q,
        q,
        g,
        log,
        delta,
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
    d_q = _walk_keys(
        d_q,
        q,
        g,
        log,
        delta,
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
    store_rows(d_query + batch * dq_batch + head * dq_head, dq_row, rows, queries, columns, d_q * scale, D)
