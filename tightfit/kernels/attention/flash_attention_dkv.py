"""∂K and ∂V of flash attention: a program holds one block of keys and walks over the queries that attend to it.

The queries are those of every head in the key head's group. Formulas and launch: flash_attention_backward.py.
"""

from tightfit.kernels.attention.flash_blocks import first_key, load_rows, softcapped_scores, store_rows
from tightfit.kernels.triton_support import tl, triton


@triton.jit
def _walk_queries(  # type: ignore[no-untyped-def]
    d_k,
    d_v,
    k,
    v,
    q_base,
    g_base,
    log_base,
    delta_base,
    q_head,
    q_stride,
    g_head,
    g_stride,
    at_keys,
    starts,
    window,
    before,
    begin,
    end,
    group,
    queries,
    inner,
    outer,
    HAS_BOUNDS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    MASKED: tl.constexpr,
):
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
            known = tl.minimum(rows, queries - 1)
            positions = known + before
            first = first_key(known, before, starts, window, HAS_BOUNDS, HAS_WINDOW)
            seen = (at_keys[:, None] <= positions[None, :]) & (at_keys[:, None] >= first[None, :])
            weights = tl.where(seen, weights, 0.0)
        g = load_rows(g_base + member * g_head, g_stride, rows, queries, columns, D, BLOCK_D, True)
        d_v = tl.dot(weights.to(g.dtype), g, d_v, input_precision=PRECISION)
        d_scores = weights * (tl.dot(v, g.T, input_precision=PRECISION) - delta[None, :])
        if HAS_SOFTCAP:
            d_scores *= 1.0 - tanh * tanh
        d_k = tl.dot(d_scores.to(q.dtype), q, d_k, input_precision=PRECISION)
    return d_k, d_v


@triton.jit(do_not_specialize=["heads", "group", "queries", "keys", "before", "window"])
def key_gradient_kernel(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    d_out,
    logs,
    deltas,
    starts,
    ends,
    d_key,
    d_value,
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
    dk_batch,
    dk_head,
    dk_row,
    dv_batch,
    dv_head,
    dv_row,
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
    """∂K and ∂V of one block of keys; the first blocks, which most queries see, are started first."""
    kv_heads = heads // group
    batch, kv_head = (tl.program_id(0) // kv_heads).to(tl.int64), tl.program_id(0) % kv_heads
    start = tl.program_id(1) * BLOCK_K
    at, columns = start + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    k = load_rows(key + batch * k_batch + kv_head * k_head, k_row, at, keys, columns, D, BLOCK_D, True)
    v = load_rows(value + batch * v_batch + kv_head * v_head, v_row, at, keys, columns, D, BLOCK_D, True)
    last = tl.minimum(start + BLOCK_K, keys) - 1
    starts += batch * queries
    sees_all_to, end = queries, queries
    if HAS_BOUNDS:
        ends += batch * keys
        sees_all_to, end = tl.load(ends + start), tl.load(ends + last)
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
        d_k,
        d_v,
        k,
        v,
        q_base,
        g_base,
        log_base,
        delta_base,
        q_head,
        q_row,
        g_head,
        g_row,
        at,
        starts,
        window,
        before,
        begin,
        tl.minimum(sees_all_from, end),
        group,
        queries,
        inner,
        outer,
        HAS_BOUNDS,
        HAS_WINDOW,
        HAS_SOFTCAP,
        D,
        BLOCK_D,
        PRECISION,
        BLOCK_Q,
        True,
    )
    d_k, d_v = _walk_queries(
        d_k,
        d_v,
        k,
        v,
        q_base,
        g_base,
        log_base,
        delta_base,
        q_head,
        q_row,
        g_head,
        g_row,
        at,
        starts,
        window,
        before,
        sees_all_from,
        sees_all_to,
        group,
        queries,
        inner,
        outer,
        HAS_BOUNDS,
        HAS_WINDOW,
        HAS_SOFTCAP,
        D,
        BLOCK_D,
        PRECISION,
        BLOCK_Q,
        False,
    )
    if HAS_BOUNDS or HAS_WINDOW:
        d_k, d_v = _walk_queries(
            d_k,
            d_v,
            k,
            v,
            q_base,
            g_base,
            log_base,
            delta_base,
            q_head,
            q_row,
            g_head,
            g_row,
            at,
            starts,
            window,
            before,
            tl.maximum(sees_all_from, sees_all_to),
            end,
            group,
            queries,
            inner,
            outer,
            HAS_BOUNDS,
            HAS_WINDOW,
            HAS_SOFTCAP,
            D,
            BLOCK_D,
            PRECISION,
            BLOCK_Q,
            True,
        )
    store_rows(d_key + batch * dk_batch + kv_head * dk_head, dk_row, at, keys, columns, d_k * scale, D)
    store_rows(d_value + batch * dv_batch + kv_head * dv_head, dv_row, at, keys, columns, d_v, D)
