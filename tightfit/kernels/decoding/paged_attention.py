"""Attention of one new token per sequence over keys and values in the blocks of a paged cache.

    out[b, h] = Σ_t softmax_t(cap(scale · q[b, h] · k[t])) · v[t],   t in the last `window` of lengths[b] positions

Position t of sequence b lies at block tables[b, t // block_size], place t % block_size (PagedAttention, Kwon et al.
2023). Decoding reads every key once with next to no arithmetic, so all multiprocessors must take part in reading: the
keys of a sequence are divided among `splits` programs (Flash-Decoding, Dao et al. 2023), whose softmax numerators and
denominators a second small kernel joins. Query heads that share a key head are the rows of one program.
Keys and values may be 8-bit codes with a scale per vector; they are dequantized as they are read.
Lengths are read on the device and the caller chooses the number of splits: a captured graph serves any length.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tightfit.kernels.attention.attention import attention_eager
from tightfit.kernels.attention.flash_blocks import Problem, softcapped_scores
from tightfit.kernels.attention.sink_attention import sink_attention_eager
from tightfit.kernels.operators import multiprocessors, on_device_of
from tightfit.kernels.triton_support import is_interpreted, tl, triton

BLOCK_K = 64
MOST_SPLITS = 32
WAVES = 4
"""Programs per multiprocessor that splitting aims at."""
MANY_PAIRS = 32
"""Pairs of sequence and key head from which on there are at most FEW_SPLITS: joining more costs more than it saves."""
FEW_SPLITS = 8
NARROW_BLOCK_BYTES = 4096
"""Keys that one warp takes at a time, where pairs are many: with five blocks ahead, five programs share a
multiprocessor, so that those of 64 sequences of 8B run at once."""
WIDE_HEAD_BYTES = 256
"""Bytes of a key from which on two warps are faster than four (docs/LOG.md)."""


class KeyBlocks(NamedTuple):
    """Keys that a program takes at a time, the warps that share them, and the stages of its loop over them."""

    keys: int
    warps: int
    stages: int


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    scales: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    splits: int | None = None,
    blocks: KeyBlocks | None = None,
) -> Tensor:
    """Attention of query [B, heads, D] over keys, values [blocks, block_size, kv_heads, D] by tables int32 [B, n].

    `sinks` [heads] are logits that take part in the softmax and have no value (sink_attention.py).
    Where keys and values are codes (int8, fp8), `scales` [2, blocks, block_size, kv_heads] are their float32 scales.
    """
    (B, heads, D), kv_heads = query.shape, keys.shape[2]
    assert query.stride(2) == 1
    assert keys.stride() == values.stride()
    assert tables.stride(1) == 1
    assert scales is None or scales.is_contiguous()
    blocks = blocks or key_blocks(D, query.element_size(), keys.element_size())
    assert splits is None or splits <= MOST_SPLITS
    splits = splits or split_count(B * kv_heads, tables.shape[1] * keys.shape[1], query.device)
    out = torch.empty((B, heads, D), device=query.device, dtype=query.dtype)
    if B == 0:
        return out
    parts = torch.empty((B, heads, splits, D), device=query.device, dtype=torch.float32)
    norms = torch.empty((2, B, heads, splits), device=query.device, dtype=torch.float32)
    problem = Problem(scale, window or 0, softcap or 0.0, None)
    group = heads // kv_heads
    with on_device_of(query):
        _kernel[(kv_heads, splits, B)](
            query,
            keys,
            values,
            keys if scales is None else scales[0],
            values if scales is None else scales[1],
            query if sinks is None else sinks,
            tables,
            lengths,
            parts if splits > 1 else out,
            norms,
            *query.stride()[:2],
            *keys.stride()[:3],
            tables.stride(0),
            window or 0,
            *problem.factors(),
            **problem.constants_without_documents(query[None]),
            GROUP=group,
            GROUP_2=max(16, triton.next_power_of_2(group)),
            BLOCK_SIZE=keys.shape[1],
            BLOCK_K=blocks.keys,
            SINGLE=splits == 1,
            CODES=scales is not None,
            HAS_SINKS=sinks is not None,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
        if splits > 1:
            _join(parts, norms, out)
    return out


def _join(parts: Tensor, norms: Tensor, out: Tensor) -> None:
    """Join the partial results of every sequence's splits into `out`."""
    B, heads, splits, D = parts.shape
    _join_kernel[(heads, B)](
        parts,
        norms,
        out,
        splits,
        D=D,
        BLOCK_D=triton.next_power_of_2(D),
        MOST=MOST_SPLITS,
        num_warps=4,
    )


def split_count(pairs: int, capacity: int, device: torch.device) -> int:
    """How many programs share a sequence of up to `capacity` keys, given pairs of sequence and key head."""
    wanted = WAVES * multiprocessors(device) // max(1, pairs)
    most = MOST_SPLITS if pairs < MANY_PAIRS else FEW_SPLITS
    return max(1, min(wanted, -(-capacity // keys_at_a_time()), most))


def key_blocks(head: int, query_bytes: int, key_bytes: int, *, are_many: bool = True) -> KeyBlocks:
    """The blocks of keys for heads of that size and numbers of so many bytes, where pairs of sequence and key head
    `are_many` or few."""
    if are_many and key_bytes == 2 and head * key_bytes <= WIDE_HEAD_BYTES and not is_interpreted():
        return KeyBlocks(NARROW_BLOCK_BYTES // (triton.next_power_of_2(head) * key_bytes), 1, 6)
    warps = 2 if are_many and head * query_bytes >= WIDE_HEAD_BYTES else 4
    return KeyBlocks(keys_at_a_time(), warps, 3 if head * key_bytes <= 256 else 2)


def keys_at_a_time() -> int:
    """Keys that a program takes at a time."""
    return 16 if is_interpreted() else BLOCK_K


def paged_attention_eager(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The reference: each sequence's keys gathered, then attention in full."""
    made = []
    for row, table, length in zip(query, tables.long(), lengths.tolist(), strict=True):
        first = 0 if window is None else max(0, length - window)
        key, value = (part[table].flatten(0, 1)[first:length].transpose(0, 1)[None] for part in (keys, values))
        one = row[None, :, None]
        if sinks is not None:
            made.append(sink_attention_eager(one, key, value, sinks, None, scale=scale)[0, :, 0])
        else:
            made.append(attention_eager(one, key, value, None, scale=scale, softcap=softcap)[0, :, 0])
    return torch.stack(made)


@triton.jit(do_not_specialize=["table_row", "window"])
def _kernel(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    key_scales,
    value_scales,
    sinks,
    tables,
    lengths,
    parts,
    norms,
    q_batch,
    q_head,
    kv_block,
    kv_place,
    kv_head,
    table_row,
    window,
    inner,
    outer,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SINGLE: tl.constexpr,
    CODES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """The queries of one key head over one split of a sequence's keys, in whole blocks of BLOCK_K."""
    head, split, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    splits = tl.num_programs(1)
    rows, columns = tl.arange(0, GROUP_2), tl.arange(0, BLOCK_D)
    in_group, in_head = rows < GROUP, columns < D
    at_query = query + batch * q_batch + (head * GROUP + rows[:, None]) * q_head + columns[None, :]
    q = tl.load(at_query, mask=in_group[:, None] & in_head[None, :], other=0.0)
    length = tl.load(lengths + batch)
    first = tl.maximum(length - window, 0) if HAS_WINDOW else 0
    begin_block = first // BLOCK_K
    blocks = tl.cdiv(length, BLOCK_K) - begin_block
    share = tl.cdiv(blocks, splits)
    begin = (begin_block + split * share) * BLOCK_K
    end = tl.minimum(begin + share * BLOCK_K, length)

    acc = tl.zeros([GROUP_2, BLOCK_D], tl.float32)
    highest = tl.full([GROUP_2], -1.0e30, tl.float32)
    denominator = tl.zeros([GROUP_2], tl.float32)
    if HAS_SINKS:  # as a key with the value 0, in the first split
        sink = tl.load(sinks + head * GROUP + rows, mask=in_group, other=0.0).to(tl.float32) * 1.4426950408889634
        highest = tl.where(split == 0, sink, highest)
        denominator = tl.where(split == 0, 1.0, denominator)
    for start in range(begin, end, BLOCK_K):
        position = start + tl.arange(0, BLOCK_K)
        here = (position < end) & (position >= first)
        block = tl.load(tables + batch * table_row + position // BLOCK_SIZE, mask=here, other=0).to(tl.int64)
        at = block * kv_block + (position % BLOCK_SIZE) * kv_place + head * kv_head
        mask = here[:, None] & in_head[None, :]
        k = tl.load(keys + at[:, None] + columns[None, :], mask=mask, other=0.0)
        v = tl.load(values + at[:, None] + columns[None, :], mask=mask, other=0.0)
        if CODES:
            at_scale = (block * BLOCK_SIZE + position % BLOCK_SIZE) * tl.num_programs(0) + head
            key_scale = tl.load(key_scales + at_scale, mask=here, other=0.0)
            value_scale = tl.load(value_scales + at_scale, mask=here, other=0.0)
            k = (k.to(tl.float32) * key_scale[:, None]).to(q.dtype)
            v = (v.to(tl.float32) * value_scale[:, None]).to(q.dtype)
        scores, _ = softcapped_scores(tl.dot(q, k.T, input_precision=PRECISION), inner, outer, HAS_SOFTCAP)
        scores = tl.where(here[None, :], scores, -1.0e30)
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.where(here[None, :], tl.exp2(scores - higher[:, None]), 0.0)
        shrink = tl.exp2(highest - higher)
        denominator = denominator * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        highest = higher
    store = in_group[:, None] & in_head[None, :]
    row = batch * (tl.num_programs(0) * GROUP) + head * GROUP + rows
    if SINGLE:
        out = acc / denominator[:, None]
        tl.store(parts + row[:, None] * D + columns[None, :], out.to(parts.dtype.element_ty), mask=store)
    else:
        place = row * splits + split
        tl.store(parts + place[:, None] * D + columns[None, :], acc, mask=store)
        total = tl.num_programs(2).to(tl.int64) * tl.num_programs(0) * GROUP * splits
        tl.store(norms + place, highest, mask=in_group)
        tl.store(norms + total + place, denominator, mask=in_group)


@triton.jit(do_not_specialize=["splits"])
def _join_kernel(  # type: ignore[no-untyped-def]
    parts, norms, out, splits, D: tl.constexpr, BLOCK_D: tl.constexpr, MOST: tl.constexpr
):
    """Σ_s parts[s] · 2^(highest[s] − highest) / Σ_s denominator[s] · 2^(highest[s] − highest), for one head."""
    heads = tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64) * heads + tl.program_id(0)
    total = tl.num_programs(1).to(tl.int64) * heads * splits
    split, columns = tl.arange(0, MOST), tl.arange(0, BLOCK_D)
    here = split < splits
    highest = tl.load(norms + row * splits + split, mask=here, other=-1.0e30)
    denominator = tl.load(norms + total + row * splits + split, mask=here, other=0.0)
    factor = tl.exp2(highest - tl.max(highest, 0))
    at = (row * splits + split)[:, None] * D + columns[None, :]
    part = tl.load(parts + at, mask=here[:, None] & (columns[None, :] < D), other=0.0)
    summed = tl.sum(part * factor[:, None], 0) / tl.sum(denominator * factor, 0)
    tl.store(out + row * D + columns, summed.to(out.dtype.element_ty), mask=columns < D)
