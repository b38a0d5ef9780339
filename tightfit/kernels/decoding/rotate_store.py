"""Norms, rope and the write to the paged cache, between a step's qkv projection and its attention, in one kernel.

Queries and keys are normed (where the model does so) and rotated by their positions (rope); queries are returned, keys
and values are written to the paged cache. A program has one head of one token, or of a block of tokens where a step has
many (prompts).
"""

import torch
from torch import Tensor

from tightfit.kernels.attention.rope import rope_eager
from tightfit.kernels.norm.rms_norm import rms_norm_eager
from tightfit.kernels.operators import on_device_of
from tightfit.kernels.triton_support import is_interpreted, tl, triton

FEW_TOKENS = 8 if is_interpreted() else 64
MANY_TOKENS = 4 if is_interpreted() else 16


def rotate_store(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 0.0,
    norm_offset: float = 0.0,
) -> Tensor:
    """Queries [M, heads, D] of qkv [M, (heads + 2 kv_heads) · D]; keys and values [blocks, size, kv_heads, D] written.

    `slots` [M] are the tokens' places in the cache, block · size + place in the block; cos and sin are tables
    [positions, d/2].
    """
    (M, _), (kv_heads, D) = qkv.shape, keys.shape[2:]
    out = torch.empty((M, heads, D), device=qkv.device, dtype=qkv.dtype)
    half = cos.shape[-1]
    assert keys.stride() == values.stride()
    assert keys.stride(0) == keys.shape[1] * keys.stride(1)
    tokens = 1 if M <= FEW_TOKENS else MANY_TOKENS
    with on_device_of(qkv):
        _kernel[(heads + 2 * kv_heads, triton.cdiv(M, tokens))](
            qkv,
            out,
            keys,
            values,
            slots,
            positions,
            cos,
            sin,
            qkv if q_norm is None else q_norm,
            qkv if k_norm is None else k_norm,
            M,
            qkv.stride(0),
            keys.stride(1),
            cos.stride(0),
            norm_eps,
            norm_offset,
            HEADS=heads,
            KV_HEADS=kv_heads,
            D=D,
            HALF=half,
            HALF_2=triton.next_power_of_2(half),
            REST=D - 2 * half,
            REST_2=triton.next_power_of_2(max(D - 2 * half, 1)),
            BLOCK_D=triton.next_power_of_2(D),
            HAS_NORM=q_norm is not None,
            TOKENS=tokens,
            num_warps=1 if tokens == 1 else 4,
        )
    return out


def rotate_store_eager(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 0.0,
    norm_offset: float = 0.0,
) -> Tensor:
    """The reference: split, norm, rotate, write."""
    (M, _), (kv_heads, D) = qkv.shape, keys.shape[2:]
    q, k, v = (part.view(M, -1, D) for part in qkv.split([heads * D, kv_heads * D, kv_heads * D], dim=1))
    if q_norm is not None and k_norm is not None:
        q = rms_norm_eager(q, q_norm, norm_eps, offset=norm_offset)[0]
        k = rms_norm_eager(k, k_norm, norm_eps, offset=norm_offset)[0]
    tables = (table[positions][None, None] for table in (cos, sin))
    q, k = rope_eager(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *tables)
    block, place = slots // keys.shape[1], slots % keys.shape[1]
    keys[block, place] = k[0].transpose(0, 1)
    values[block, place] = v
    return q[0].transpose(0, 1)


@triton.jit(do_not_specialize=["x_row", "M"])
def _kernel(  # type: ignore[no-untyped-def]
    qkv,
    out,
    keys,
    values,
    slots,
    positions,
    cos,
    sin,
    q_norm,
    k_norm,
    M,
    x_row,
    cache_place,
    table_row,
    eps,
    offset,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALF_2: tl.constexpr,
    REST: tl.constexpr,
    REST_2: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_NORM: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One head of TOKENS tokens."""
    head, token = tl.program_id(0), tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    here = token < M
    x = qkv + token[:, None] * x_row + head * D
    slot = tl.load(slots + token, mask=here, other=0).to(tl.int64)[:, None]
    if head >= HEADS + KV_HEADS:
        columns = tl.arange(0, BLOCK_D)[None, :]
        mask = here[:, None] & (columns < D)
        v = tl.load(x + columns, mask=mask, other=0.0)
        tl.store(values + slot * cache_place + (head - HEADS - KV_HEADS) * D + columns, v, mask=mask)
    else:
        pair, rest = tl.arange(0, HALF_2)[None, :], 2 * HALF + tl.arange(0, REST_2)[None, :]
        in_pair, in_rest = here[:, None] & (pair < HALF), here[:, None] & (rest < D)
        first = tl.load(x + pair, mask=in_pair, other=0.0).to(tl.float32)
        second = tl.load(x + HALF + pair, mask=in_pair, other=0.0).to(tl.float32)
        others = tl.load(x + rest, mask=in_rest, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(others * others, 1)
            scale = tl.rsqrt(squares / D + eps)[:, None]
            q_share = tl.where(head < HEADS, 1.0, 0.0)
            first = first * scale * _weight(q_norm, k_norm, pair, pair < HALF, q_share, offset)
            second = second * scale * _weight(q_norm, k_norm, HALF + pair, pair < HALF, q_share, offset)
            others = others * scale * _weight(q_norm, k_norm, rest, rest < D, q_share, offset)
            first, second = _rounded(first, out), _rounded(second, out)
        angle = tl.load(positions + token, mask=here, other=0).to(tl.int64)[:, None] * table_row + pair
        c = tl.load(cos + angle, mask=in_pair, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=in_pair, other=0.0).to(tl.float32)
        turned = (first * c - second * s).to(out.dtype.element_ty)
        other = (second * c + first * s).to(out.dtype.element_ty)
        kept = others.to(out.dtype.element_ty)
        if head < HEADS:
            to_query = out + (token[:, None] * HEADS + head) * D
            _store(to_query, turned, other, kept, pair, rest, in_pair, in_rest, HALF, REST)
        else:
            to_cache = keys + slot * cache_place + (head - HEADS) * D
            _store(to_cache, turned, other, kept, pair, rest, in_pair, in_rest, HALF, REST)


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    to, turned, other, kept, pair, rest, in_pair, in_rest, HALF: tl.constexpr, REST: tl.constexpr
):
    tl.store(to + pair, turned, mask=in_pair)
    tl.store(to + HALF + pair, other, mask=in_pair)
    if REST:
        tl.store(to + rest, kept, mask=in_rest)


@triton.jit
def _weight(q_norm, k_norm, at, here, q_share, offset):  # type: ignore[no-untyped-def]
    """The norm's weight of queries, or that of keys."""
    q = tl.load(q_norm + at, mask=here, other=0.0).to(tl.float32)
    k = tl.load(k_norm + at, mask=here, other=0.0).to(tl.float32)
    return q * q_share + k * (1.0 - q_share) + offset


@triton.jit
def _rounded(x, out):  # type: ignore[no-untyped-def]
    """x, rounded as a separate norm would."""
    return x.to(out.dtype.element_ty).to(tl.float32)
