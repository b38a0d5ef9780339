"""Prefill: causal attention of many new tokens of several sequences over the blocks of a paged cache, in one launch.

    out[i, h] = Σ_t softmax_t(cap(scale · q[i, h] · k[t])) · v[t],   t from position(i) − window + 1 to position(i)

Prompts of a step have all kinds of lengths, and some continue sequences that are in the cache already. Instead of one
operation each, the rows of all prompts are cut into tiles of equal size (`query_tiles`), and one program takes one tile
of one head: it walks over the keys of its sequence through the block table (Kwon et al. 2023), as flash_attention.py
walks over a contiguous row. Only the tiles depend on the lengths: a new shape needs no planning.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tightfit.kernels.attention.attention import attention_eager
from tightfit.kernels.attention.attention_mask import AttentionMask
from tightfit.kernels.attention.flash_blocks import Blocks, Problem, capability, passes, softcapped_scores
from tightfit.kernels.attention.sink_attention import sink_attention_eager
from tightfit.kernels.operators import on_device_of
from tightfit.kernels.triton_support import tl, triton


@dataclass(frozen=True)
class Rows:
    """`count` rows of a step from `first_row` on, with the positions `before`, `before` + 1, … of one sequence."""

    first_row: int
    count: int
    before: int


def query_tiles(pieces: Iterable[Rows], block: int) -> list[tuple[int, int, int, int]]:
    """(first row, rows, first position, piece) of each tile; those with the most keys to see come first."""
    tiles = [
        (piece.first_row + done, min(block, piece.count - done), piece.before + done, index)
        for index, piece in enumerate(pieces)
        for done in range(0, piece.count, block)
    ]
    return sorted(tiles, key=lambda tile: -tile[2])


def tile_rows(query: Tensor) -> int:
    """Rows of a tile for queries of this head size and dtype on their card."""
    return passes(query.shape[-1], query.dtype, capability(query.device)).forward.queries


def paged_prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    tiles: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    blocks: Blocks | None = None,
) -> None:
    """Attention of the tiles' rows of query [N, heads, D] into the same rows of out.

    keys, values are [blocks, block_size, kv_heads, D], tables int32 [pieces, n], tiles int32 [tiles, 4]; `sinks`
    [heads] as in paged_attention.py.
    """
    (_, heads, D), kv_heads = query.shape, keys.shape[2]
    assert query.stride(2) == out.stride(2) == tables.stride(1) == 1
    assert keys.stride() == values.stride()
    blocks = blocks or passes(D, query.dtype, capability(query.device)).forward
    problem = Problem(scale, window or 0, softcap or 0.0, None)
    with on_device_of(query):
        _kernel[(heads, len(tiles))](
            query,
            keys,
            values,
            query if sinks is None else sinks,
            tables,
            tiles,
            out,
            *query.stride()[:2],
            *keys.stride()[:3],
            *out.stride()[:2],
            tables.stride(0),
            window or 0,
            *problem.factors(),
            **problem.constants_without_documents(query[None]),
            GROUP=heads // kv_heads,
            BLOCK_SIZE=keys.shape[1],
            BLOCK_Q=blocks.queries,
            BLOCK_K=blocks.keys,
            HAS_SINKS=sinks is not None,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )


def paged_prefill_eager(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    pieces: Iterable[Rows],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The reference, [rows of all pieces, heads, D]: each piece's keys gathered, then attention in full."""
    made = []
    for piece, table in zip(pieces, tables.long(), strict=True):
        end = piece.before + piece.count
        rows = query[piece.first_row : piece.first_row + piece.count].transpose(0, 1)[None]
        key, value = (part[table].flatten(0, 1)[:end].transpose(0, 1)[None] for part in (keys, values))
        seen = AttentionMask(piece.count, end, query.device).dense(window, explicit=True)
        if sinks is not None:
            attended = sink_attention_eager(rows, key, value, sinks, seen, scale=scale)
        else:
            attended = attention_eager(rows, key, value, seen, scale=scale, softcap=softcap)
        made.append(attended[0].transpose(0, 1))
    return torch.cat(made)


@triton.jit
def _walk(  # type: ignore[no-untyped-def]
    acc,
    highest,
    denominator,
    q,
    keys,
    values,
    table,
    kv_block,
    kv_place,
    positions,
    first,
    begin,
    end,
    last,
    inner,
    outer,
    HAS_SOFTCAP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Key blocks from `begin` to `end`; a masked score is multiplied by zero when the row's first real key comes."""
    columns = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        block = tl.load(table + tl.minimum(at, last) // BLOCK_SIZE).to(tl.int64)
        place = (block * kv_block + (at % BLOCK_SIZE) * kv_place)[:, None] + columns[None, :]
        if MASKED:
            here = (at <= last)[:, None] & (columns < D)[None, :]
            k = tl.load(keys + place, mask=here, other=0.0)
            v = tl.load(values + place, mask=here, other=0.0)
        elif D != BLOCK_D:
            k = tl.load(keys + place, mask=(columns < D)[None, :], other=0.0)
            v = tl.load(values + place, mask=(columns < D)[None, :], other=0.0)
        else:
            k = tl.load(keys + place)
            v = tl.load(values + place)
        scores, _ = softcapped_scores(tl.dot(q, k.T, input_precision=PRECISION), inner, outer, HAS_SOFTCAP)
        if MASKED:
            seen = (at[None, :] <= positions[:, None]) & (at[None, :] >= first[:, None])
            scores = tl.where(seen, scores, -1.0e30)
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        denominator = denominator * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        highest = higher
    return acc, highest, denominator


@triton.jit(do_not_specialize=["table_row", "window"])
def _kernel(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    sinks,
    tables,
    tiles,
    out,
    q_row,
    q_head,
    kv_block,
    kv_place,
    kv_head,
    o_row,
    o_head,
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
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One tile of one head: first keys that only some rows see (windows), then those all see, then the diagonal."""
    head, tile = tl.program_id(0), tiles + tl.program_id(1) * 4
    row, count, position = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    table = tables + tl.load(tile + 3).to(tl.int64) * table_row
    rows, columns = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    own = (rows < count)[:, None] & (columns < D)[None, :]
    q = tl.load(query + (row + rows)[:, None] * q_row + head * q_head + columns[None, :], mask=own, other=0.0)
    last = position + count - 1
    positions = tl.minimum(position + rows, last)
    first = tl.maximum(positions - window + 1, 0) if HAS_WINDOW else positions * 0
    keys += (head // GROUP) * kv_head
    values += (head // GROUP) * kv_head

    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    highest = tl.full([BLOCK_Q], -1.0e30, tl.float32)
    denominator = tl.zeros([BLOCK_Q], tl.float32)
    if HAS_SINKS:  # as a key with the value 0 that every row sees
        highest = tl.zeros([BLOCK_Q], tl.float32) + tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        denominator += 1.0
    seen_by_all_from = 0
    if HAS_WINDOW:
        lowest = tl.maximum(position - window + 1, 0) // BLOCK_K * BLOCK_K
        seen_by_all_from = tl.cdiv(tl.maximum(last - window + 1, 0), BLOCK_K) * BLOCK_K
        acc, highest, denominator = _walk(
            acc=acc,
            highest=highest,
            denominator=denominator,
            q=q,
            keys=keys,
            values=values,
            table=table,
            kv_block=kv_block,
            kv_place=kv_place,
            positions=positions,
            first=first,
            begin=lowest,
            end=tl.minimum(seen_by_all_from, last + 1),
            last=last,
            inner=inner,
            outer=outer,
            HAS_SOFTCAP=HAS_SOFTCAP,
            D=D,
            BLOCK_D=BLOCK_D,
            PRECISION=PRECISION,
            BLOCK_SIZE=BLOCK_SIZE,
            BLOCK_K=BLOCK_K,
            MASKED=True,
        )
    seen_by_all_to = (position + 1) // BLOCK_K * BLOCK_K
    acc, highest, denominator = _walk(
        acc=acc,
        highest=highest,
        denominator=denominator,
        q=q,
        keys=keys,
        values=values,
        table=table,
        kv_block=kv_block,
        kv_place=kv_place,
        positions=positions,
        first=first,
        begin=seen_by_all_from,
        end=seen_by_all_to,
        last=last,
        inner=inner,
        outer=outer,
        HAS_SOFTCAP=HAS_SOFTCAP,
        D=D,
        BLOCK_D=BLOCK_D,
        PRECISION=PRECISION,
        BLOCK_SIZE=BLOCK_SIZE,
        BLOCK_K=BLOCK_K,
        MASKED=False,
    )
    acc, highest, denominator = _walk(
        acc=acc,
        highest=highest,
        denominator=denominator,
        q=q,
        keys=keys,
        values=values,
        table=table,
        kv_block=kv_block,
        kv_place=kv_place,
        positions=positions,
        first=first,
        begin=tl.maximum(seen_by_all_from, seen_by_all_to),
        end=last + 1,
        last=last,
        inner=inner,
        outer=outer,
        HAS_SOFTCAP=HAS_SOFTCAP,
        D=D,
        BLOCK_D=BLOCK_D,
        PRECISION=PRECISION,
        BLOCK_SIZE=BLOCK_SIZE,
        BLOCK_K=BLOCK_K,
        MASKED=True,
    )
    made = (acc / denominator[:, None]).to(out.dtype.element_ty)
    tl.store(out + (row + rows)[:, None] * o_row + head * o_head + columns[None, :], made, mask=own)
