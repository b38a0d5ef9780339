"""Attention of a decoding step in one kernel, from the output of the qkv projection on: norms, rope, cache, attention.

For one new token per sequence: queries and the key are normed (where the model does so) and rotated by their position
(rope), key and value are written to the paged cache, and the queries attend to the whole sequence:

    out[b, h] = Σ_t softmax_t(cap(scale · q[b, h] · k[t])) · v[t],   t in the last `window` of lengths[b] positions

It fuses rotate_store.py and paged_attention.py, as small kernels spend most of their time in starting. As there, the
keys of a sequence are divided among `splits` programs (Flash-Decoding, Dao et al. 2023). They take blocks of keys in
turn, so that a program can look up its first block in the block table before it knows how long the sequence is. Every
program rotates the queries of its heads again, which is cheap; the one whose split has the newest position also rotates
and stores the new key. It attends to that key and value from registers, so no program waits for the write. The last
program of a sequence and key head to finish, by an atomic counter, joins the splits' partial results and sets the
counter back to zero for the next launch.
"""

import torch
from torch import Tensor

from tightfit.kernels.attention.flash_blocks import Problem, softcapped_scores
from tightfit.kernels.decoding.paged_attention import (
    FEW_SPLITS,
    MANY_PAIRS,
    MOST_SPLITS,
    KeyBlocks,
    key_blocks,
    paged_attention_eager,
    split_count,
)
from tightfit.kernels.decoding.rotate_store import rotate_store_eager
from tightfit.kernels.operators import on_device_of
from tightfit.kernels.overlap import launch_next, pdl, wait_for_previous
from tightfit.kernels.triton_support import tl, triton


def decode_attention(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    cos: Tensor,
    sin: Tensor,
    counters: Tensor,
    *,
    heads: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 0.0,
    norm_offset: float = 0.0,
    splits: int | None = None,
    overlap: bool = False,
    blocks: KeyBlocks | None = None,
) -> Tensor:
    """Attention [B, heads, D] of qkv [B, (heads + 2 kv_heads) · D] over the cache, which gets the new keys and values.

    keys, values [blocks, block_size, kv_heads, D]; tables int32 [B, n]; lengths [B] count the new token; cos and sin
    [positions, d/2]; counters int32 [≥ B · kv_heads] are zero before and after.
    """
    B, (kv_heads, D) = qkv.shape[0], keys.shape[2:]
    pairs = B * kv_heads
    _check(qkv, keys, values, tables, counters)
    assert splits is None or splits <= MOST_SPLITS
    splits = splits or split_count(pairs, tables.shape[1] * keys.shape[1], qkv.device)
    out = torch.empty((B, heads, D), device=qkv.device, dtype=qkv.dtype)
    parts = torch.empty((B, heads, splits, D), device=qkv.device, dtype=torch.float32)
    norms = torch.empty((2, B, heads, splits), device=qkv.device, dtype=torch.float32)
    problem = Problem(scale, window or 0, softcap or 0.0, None)
    group, are_many = heads // kv_heads, pairs >= MANY_PAIRS and splits <= FEW_SPLITS
    blocks = blocks or key_blocks(D, keys.element_size(), keys.element_size(), are_many=are_many)
    with on_device_of(qkv):
        _kernel[(kv_heads, splits, B)](
            qkv,
            keys,
            values,
            tables,
            lengths,
            cos,
            sin,
            qkv if q_norm is None else q_norm,
            qkv if k_norm is None else k_norm,
            counters,
            out,
            parts,
            norms,
            qkv.stride(0),
            *keys.stride()[:3],
            tables.stride(0),
            tables.shape[1],
            cos.stride(0),
            norm_eps,
            norm_offset,
            window or 0,
            *problem.factors(),
            **problem.constants_without_documents(out[None]),
            HALF=cos.shape[-1],
            HAS_NORM=q_norm is not None,
            GROUP=group,
            GROUP_2=max(16, triton.next_power_of_2(group)),
            BLOCK_SIZE=keys.shape[1],
            BLOCK_K=blocks.keys,
            LEAST_BLOCKS=2 if are_many else 1,
            MOST=FEW_SPLITS if are_many else MOST_SPLITS,
            OVERLAP=overlap,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
            **pdl(overlap),
        )
    return out


def _check(qkv: Tensor, keys: Tensor, values: Tensor, tables: Tensor, counters: Tensor) -> None:
    """Assert what the kernel relies on."""
    assert keys.stride() == values.stride()
    assert tables.stride(1) == qkv.stride(1) == 1
    assert counters.numel() >= qkv.shape[0] * keys.shape[2]


def decode_attention_eager(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    heads: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 0.0,
    norm_offset: float = 0.0,
) -> Tensor:
    """The reference: rotate and store, then attend."""
    last = lengths.long() - 1
    block_size = keys.shape[1]
    blocks = tables.long().gather(1, (last // block_size)[:, None])[:, 0]
    query = rotate_store_eager(
        qkv,
        keys,
        values,
        blocks * block_size + last % block_size,
        last,
        cos,
        sin,
        heads=heads,
        q_norm=q_norm,
        k_norm=k_norm,
        norm_eps=norm_eps,
        norm_offset=norm_offset,
    )
    return paged_attention_eager(query, keys, values, tables, lengths, scale=scale, window=window, softcap=softcap)


@triton.jit
def _turned(  # type: ignore[no-untyped-def]
    x, norm, columns, here, c, s, eps, offset, D: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr
):
    """Heads at x [rows, BLOCK_D], normed and rotated: column i < HALF is paired with i + HALF, from 2 HALF on as is."""
    partner = tl.where(columns < HALF, columns + HALF, tl.where(columns < 2 * HALF, columns - HALF, columns))
    own = tl.load(x + columns[None, :], mask=here, other=0.0)
    other = tl.load(x + partner[None, :], mask=here, other=0.0)
    kind = own.dtype
    own, other = own.to(tl.float32), other.to(tl.float32)
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(own * own, 1) / D + eps)[:, None]
        in_head = columns < D
        own_weight = tl.load(norm + columns, mask=in_head, other=0.0).to(tl.float32) + offset
        other_weight = tl.load(norm + partner, mask=in_head, other=0.0).to(tl.float32) + offset
        own = (own * factor * own_weight[None, :]).to(kind).to(tl.float32)  # rounded as a separate norm would
        other = (other * factor * other_weight[None, :]).to(kind).to(tl.float32)
    signed = tl.where(columns < HALF, -s, s)
    return (own * c[None, :] + other * signed[None, :]).to(kind)


@triton.jit(do_not_specialize=["window"])
def _kernel(  # type: ignore[no-untyped-def]
    qkv,
    keys,
    values,
    tables,
    lengths,
    cos,
    sin,
    q_norm,
    k_norm,
    counters,
    out,
    parts,
    norms,
    x_row,
    kv_block,
    kv_place,
    kv_head,
    table_row,
    table_width,
    angle_row,
    eps,
    offset,
    window,
    inner,
    outer,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LEAST_BLOCKS: tl.constexpr,
    MOST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The queries of one key head over one split of a sequence's keys, in whole blocks of BLOCK_K.

    Whatever does not depend on the projection (lengths, tables, angles, older keys) is loaded before waiting for it.
    """
    launch_next(OVERLAP)
    head, split, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    kv_heads, most_splits = tl.num_programs(0), tl.num_programs(1)
    rows, columns = tl.arange(0, GROUP_2), tl.arange(0, BLOCK_D)
    in_group, in_head = rows < GROUP, columns < D
    length = tl.load(lengths + batch).to(tl.int32)
    newest = length - 1
    first = tl.maximum(length - window, 0) if HAS_WINDOW else 0
    begin_block = first // BLOCK_K
    blocks = tl.cdiv(length, BLOCK_K) - begin_block
    splits = tl.maximum(tl.minimum(most_splits, blocks // LEAST_BLOCKS), 1)
    begin = (begin_block + split) * BLOCK_K
    table = tables + batch * table_row
    pages = _pages(table, table_width, begin, BLOCK_SIZE, BLOCK_K)  # before the length is known: one wait less
    if split >= splits:
        return
    has_newest = (newest // BLOCK_K - begin_block) % splits == split
    position = tl.maximum(newest, 0).to(tl.int64)
    place = tl.load(table + position // BLOCK_SIZE).to(tl.int64) * kv_block + (position % BLOCK_SIZE) * kv_place
    in_rope = columns < 2 * HALF
    c = tl.load(cos + position * angle_row + columns % HALF, mask=in_rope, other=1.0).to(tl.float32)
    s = tl.load(sin + position * angle_row + columns % HALF, mask=in_rope, other=0.0).to(tl.float32)
    keys += head * kv_head
    values += head * kv_head
    group_mask = in_group[:, None] & in_head[None, :]
    k, v, here = _older(keys, values, pages, begin, first, newest, kv_block, kv_place, columns, D, BLOCK_SIZE, BLOCK_K)
    wait_for_previous(OVERLAP)

    x = qkv + batch * x_row
    at_heads = x + (head * GROUP + rows[:, None]) * D
    at_key = x + (kv_heads * GROUP + head) * D + tl.zeros([1, 1], tl.int32)
    v_new = tl.load(x + (kv_heads * (GROUP + 1) + head) * D + columns, mask=in_head, other=0.0)
    q = _turned(at_heads, q_norm, columns, group_mask, c, s, eps, offset, D, HALF, HAS_NORM)
    k_new = _turned(at_key, k_norm, columns, in_head[None, :], c, s, eps, offset, D, HALF, HAS_NORM)
    stores = (columns < tl.where(has_newest, D, 0)) & in_head
    tl.store(keys + place + columns[None, :], k_new, mask=stores[None, :])
    tl.store(values + place + columns, v_new, mask=stores)
    highest = softcapped_scores(tl.sum(q.to(tl.float32) * k_new.to(tl.float32), 1), inner, outer, HAS_SOFTCAP)[0]
    highest = tl.where(has_newest, highest, -1.0e30)
    denominator = tl.where(has_newest, 1.0, 0.0) + tl.zeros([GROUP_2], tl.float32)
    acc = tl.where(has_newest, v_new.to(tl.float32)[None, :], 0.0) + tl.zeros([GROUP_2, BLOCK_D], tl.float32)
    acc, highest, denominator = _attended(
        acc=acc,
        highest=highest,
        denominator=denominator,
        q=q,
        k=k,
        v=v,
        here=here,
        inner=inner,
        outer=outer,
        HAS_SOFTCAP=HAS_SOFTCAP,
        PRECISION=PRECISION,
    )
    for start in range(begin + splits * BLOCK_K, newest, splits * BLOCK_K):
        k, v, here = _older(
            keys=keys,
            values=values,
            pages=_pages(table, table_width, start, BLOCK_SIZE, BLOCK_K),
            start=start,
            first=first,
            before=newest,
            kv_block=kv_block,
            kv_place=kv_place,
            columns=columns,
            D=D,
            BLOCK_SIZE=BLOCK_SIZE,
            BLOCK_K=BLOCK_K,
        )
        acc, highest, denominator = _attended(
            acc=acc,
            highest=highest,
            denominator=denominator,
            q=q,
            k=k,
            v=v,
            here=here,
            inner=inner,
            outer=outer,
            HAS_SOFTCAP=HAS_SOFTCAP,
            PRECISION=PRECISION,
        )

    row = batch * (kv_heads * GROUP) + head * GROUP + rows
    to_out = out + row[:, None] * D + columns[None, :]
    if splits == 1:
        tl.store(to_out, (acc / denominator[:, None]).to(out.dtype.element_ty), mask=group_mask)
    else:
        total = tl.num_programs(2).to(tl.int64) * kv_heads * GROUP * most_splits
        shares = row * most_splits + split
        tl.store(parts + shares[:, None] * D + columns[None, :], acc, mask=group_mask)
        tl.store(norms + shares, highest, mask=in_group)
        tl.store(norms + total + shares, denominator, mask=in_group)
        tl.debug_barrier()  # all of the program's threads have stored before the counter rises
        counter = counters + batch * kv_heads + head
        if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
            tl.store(counter, 0)
            _join(
                parts=parts,
                norms=norms,
                out=out,
                row=tl.min(row, 0),
                total=total,
                splits=splits,
                most_splits=most_splits,
                columns=columns,
                D=D,
                BLOCK_D=BLOCK_D,
                GROUP=GROUP,
                GROUP_2=GROUP_2,
                MOST=MOST,
            )


@triton.jit
def _pages(table, table_width, start, BLOCK_SIZE: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cache blocks of the BLOCK_K positions from `start` on, as far as the block table goes."""
    page = (start + tl.arange(0, BLOCK_K)) // BLOCK_SIZE
    return tl.load(table + page, mask=page < table_width, other=0).to(tl.int64)


@triton.jit
def _older(  # type: ignore[no-untyped-def]
    keys,
    values,
    pages,
    start,
    first,
    before,
    kv_block,
    kv_place,
    columns,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Keys and values of positions from `start` on, in cache blocks `pages`, and a mask of those in [first, before)."""
    at = start + tl.arange(0, BLOCK_K)
    here = (at < before) & (at >= first)
    place = (pages * kv_block + (at % BLOCK_SIZE) * kv_place)[:, None] + columns[None, :]
    mask = here[:, None] & (columns < D)[None, :]
    return tl.load(keys + place, mask=mask, other=0.0), tl.load(values + place, mask=mask, other=0.0), here


@triton.jit
def _attended(  # type: ignore[no-untyped-def]
    acc, highest, denominator, q, k, v, here, inner, outer, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr
):
    """The running softmax (sum of values, maximum, denominator) after another block of keys."""
    scores, _ = softcapped_scores(tl.dot(q, k.T, input_precision=PRECISION), inner, outer, HAS_SOFTCAP)
    scores = tl.where(here[None, :], scores, -1.0e30)
    higher = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.where(here[None, :], tl.exp2(scores - higher[:, None]), 0.0)
    shrink = tl.exp2(highest - higher)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, higher, denominator * shrink + tl.sum(weights, 1)


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    parts,
    norms,
    out,
    row,
    total,
    splits,
    most_splits,
    columns,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_2: tl.constexpr,
    MOST: tl.constexpr,
):
    """Σ_s parts[s] · 2^(highest[s] − highest) / Σ_s denominator[s] · 2^(highest[s] − highest), heads from `row` on.

    Loads bypass the L1 cache (.cg), which does not see what other programs wrote.
    """
    # As many heads at a time as fit into registers, so that their reads are one wait for memory.
    TOGETHER: tl.constexpr = min(GROUP_2, max(1, 16384 // (MOST * BLOCK_D)))
    split = tl.arange(0, MOST)
    here = (split < splits)[None, :]
    for first in tl.static_range(0, GROUP, TOGETHER):
        head = first + tl.arange(0, TOGETHER)
        in_group = head < GROUP
        at = (row + head)[:, None] * most_splits + split[None, :]
        mask = here & in_group[:, None]
        highest = tl.load(norms + at, mask=mask, other=-1.0e30, cache_modifier=".cg")
        denominator = tl.load(norms + total + at, mask=mask, other=0.0, cache_modifier=".cg")
        in_head = (columns < D)[None, None, :]
        at_parts = parts + at[:, :, None] * D + columns[None, None, :]
        part = tl.load(at_parts, mask=mask[:, :, None] & in_head, other=0.0, cache_modifier=".cg")
        factor = tl.exp2(highest - tl.max(highest, 1)[:, None])
        made = tl.sum(part * factor[:, :, None], 1) / tl.sum(denominator * factor, 1)[:, None]
        to_out = out + (row + head)[:, None] * D + columns[None, :]
        tl.store(to_out, made.to(out.dtype.element_ty), mask=in_group[:, None] & (columns < D)[None, :])
