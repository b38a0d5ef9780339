"""Rotary positions (Su et al. 2021) applied to queries and keys in one launch.

Each pair (a, b) of a head is rotated by the angle of its position:

    a' = a · cos − b · sin        b' = b · cos + a · sin

Pairs are (i, i + d/2), Hugging Face's and our order, or with `interleaved` (2i, 2i + 1), the paper's; elements beyond
the d rotated ones of a head are unchanged. The gradient is the rotation by the opposite angle.

A program takes all heads of a few tokens, so the tables are read once per token, and any strides: [B, heads, T, D]
views of what the projections wrote ([B, T, heads · D]) need no copy. Each element is read once and written once; in
place saves the memory of a second q and k, not time (H200, 16384 tokens of an 8B model: 0.088 ms in place, 0.086 ms
not).
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tightfit.errors import UserError
from tightfit.kernels.operators import below_autograd, on_device_of, operator
from tightfit.kernels.triton_support import Impl, tl, triton, use_triton

PAIRS = 4096
"""Pairs of queries per program: two tokens of an 8B model. H200: 94.7 % of copy bandwidth; one token 94.2 %."""
PAIRS_PER_THREAD = 8


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    inplace: bool = False,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """q [B, heads, T, D] and k [B, kv_heads, T, D] rotated by cos and sin [B or 1, 1, T, d/2], d ≤ D, of any strides.

    With `inplace` the kernel writes over q and k and returns aliases of them. Nothing else may read q and k afterwards;
    an operation that saved them for backward raises there.
    """
    _check(q, k, cos, sin)
    if not use_triton(impl, q) or q.dtype != k.dtype or cos.requires_grad:
        return rope_eager(q, k, cos, sin, interleaved=interleaved)
    if inplace and not torch.compiler.is_compiling() and _is_writable(q) and _is_writable(k):
        return _RopeInPlace.apply(q, k, cos, sin, interleaved)
    return _rope(q, k, cos, sin, interleaved, False)


def rope_eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """The reference, one tensor after the other."""
    return rotate(q, cos, sin, interleaved=interleaved), rotate(k, cos, sin, interleaved=interleaved)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """x [B, heads, T, D] rotated, in plain torch."""
    half = cos.shape[-1]
    if interleaved:
        a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        parts = [torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)]
    else:
        a, b = x[..., :half], x[..., half : 2 * half]
        parts = [a * cos - b * sin, b * cos + a * sin]
    out = torch.cat(parts if 2 * half == x.shape[-1] else [*parts, x[..., 2 * half :]], dim=-1)
    return out if out.dtype == x.dtype else out.to(x.dtype)


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    B, _, T, D = q.shape
    if k.shape[0] != B or k.shape[2:] != q.shape[2:]:
        raise UserError(f"rope got q {tuple(q.shape)} and k {tuple(k.shape)}; only their number of heads may differ")
    fits = cos.ndim == 4 and cos.shape[0] in (1, B) and cos.shape[1:3] == (1, T) and 2 * cos.shape[3] <= D
    if not fits or cos.shape != sin.shape:
        raise UserError(
            f"rope got cos {tuple(cos.shape)} and sin {tuple(sin.shape)} for q {tuple(q.shape)}; "
            "both must be [B or 1, 1, T, half of the rotated size]"
        )


def _is_writable(x: Tensor) -> bool:
    """Whether x may be written in place: contiguous heads, no broadcast dimension, not a leaf that requires grad."""
    own = all(size == 1 or stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return own and x.stride(-1) == 1 and not (x.is_leaf and x.requires_grad)


@triton.jit
def _rotate_heads(  # type: ignore[no-untyped-def]
    x_ptr,
    out_ptr,
    cos,
    sin,
    token,
    in_table,
    here_token,
    head_stride,
    token_stride,
    out_head_stride,
    out_token_stride,
    HEADS: tl.constexpr,
    HEADS_2: tl.constexpr,
    HALF: tl.constexpr,
    HALF_2: tl.constexpr,
    REST: tl.constexpr,
    REST_2: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rotate the heads [HEADS] of the tokens `token` by cos and sin [tokens, 1, HALF]; copy the REST of each head."""
    head = tl.arange(0, HEADS_2)[None, :, None]
    here = here_token & (head < HEADS)
    x_ptr += token * token_stride + head * head_stride
    out_ptr += token * out_token_stride + head * out_head_stride
    out_type = out_ptr.dtype.element_ty
    if INTERLEAVED:
        whole = tl.arange(0, 2 * HALF_2)[None, None, :]
        in_whole = here & (whole < 2 * HALF)
        x = tl.load(x_ptr + whole, mask=in_whole, other=0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (x.shape[0], HEADS_2, HALF_2, 2)))
        pairs = tl.join(a * cos - b * sin, b * cos + a * sin)
        tl.store(out_ptr + whole, tl.reshape(pairs, (x.shape[0], HEADS_2, 2 * HALF_2)).to(out_type), mask=in_whole)
    else:
        pair = tl.arange(0, HALF_2)[None, None, :]
        in_pair = here & in_table
        a = tl.load(x_ptr + pair, mask=in_pair, other=0).to(tl.float32)
        b = tl.load(x_ptr + HALF + pair, mask=in_pair, other=0).to(tl.float32)
        tl.store(out_ptr + pair, (a * cos - b * sin).to(out_type), mask=in_pair)
        tl.store(out_ptr + HALF + pair, (b * cos + a * sin).to(out_type), mask=in_pair)
    if REST:
        rest = tl.arange(0, REST_2)[None, None, :]
        in_rest = here & (rest < REST)
        x_rest = tl.load(x_ptr + 2 * HALF + rest, mask=in_rest)
        tl.store(out_ptr + 2 * HALF + rest, x_rest, mask=in_rest)


@triton.jit(do_not_specialize=["tokens", "blocks"])
def _kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    cos_ptr,
    sin_ptr,
    tokens,
    blocks,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    q_out_batch,
    q_out_head,
    q_out_token,
    k_out_batch,
    k_out_head,
    k_out_token,
    table_batch,
    table_token,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS_2: tl.constexpr,
    KV_HEADS_2: tl.constexpr,
    HALF: tl.constexpr,
    HALF_2: tl.constexpr,
    REST: tl.constexpr,
    REST_2: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    token = ((tl.program_id(0) % blocks) * TOKENS + tl.arange(0, TOKENS)[:, None, None]).to(tl.int64)
    here_token = token < tokens
    pair = tl.arange(0, HALF_2)[None, None, :]
    in_table = here_token & (pair < HALF)
    at = batch * table_batch + token * table_token + pair
    cos = tl.load(cos_ptr + at, mask=in_table, other=0).to(tl.float32)
    sin = tl.load(sin_ptr + at, mask=in_table, other=0).to(tl.float32)
    if INVERSE:
        sin = -sin
    _rotate_heads(
        q_ptr + batch * q_batch,
        q_out_ptr + batch * q_out_batch,
        cos,
        sin,
        token,
        in_table,
        here_token,
        q_head,
        q_token,
        q_out_head,
        q_out_token,
        HEADS,
        HEADS_2,
        HALF,
        HALF_2,
        REST,
        REST_2,
        INTERLEAVED,
    )
    _rotate_heads(
        k_ptr + batch * k_batch,
        k_out_ptr + batch * k_out_batch,
        cos,
        sin,
        token,
        in_table,
        here_token,
        k_head,
        k_token,
        k_out_head,
        k_out_token,
        KV_HEADS,
        KV_HEADS_2,
        HALF,
        HALF_2,
        REST,
        REST_2,
        INTERLEAVED,
    )


def _launch(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> None:
    """Rotate q into q_out and k into k_out, which may be q and k themselves."""
    B, heads, T, D = q.shape
    if not q.numel():
        return
    half = cos.shape[-1]
    constants = _constants(heads, k.shape[1], T, half, 0 if q_out is q else D - 2 * half)
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    if cos.stride(-1) != 1 or cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    blocks = -(-T // constants["TOKENS"])
    tensors = q, k, q_out, k_out
    with on_device_of(q):
        _kernel[(B * blocks,)](
            *tensors,
            cos,
            sin,
            T,
            blocks,
            *(stride for x in tensors for stride in x.stride()[:3]),
            0 if cos.shape[0] == 1 else cos.stride(0),
            cos.stride(2),
            INTERLEAVED=interleaved,
            INVERSE=inverse,
            **constants,
        )


@lru_cache(maxsize=1024)  # uncached, this took a twentieth of the host's time for a layer
def _constants(heads: int, kv_heads: int, length: int, half: int, rest: int) -> dict[str, int]:
    """Sizes, their next powers of two (`_2`), tokens per program and warps."""
    heads_2, kv_heads_2, half_2, rest_2 = (triton.next_power_of_2(max(x, 1)) for x in (heads, kv_heads, half, rest))
    tokens = min(max(1, PAIRS // (heads_2 * half_2)), triton.next_power_of_2(length))
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEADS_2": heads_2,
        "KV_HEADS_2": kv_heads_2,
        "HALF": half,
        "HALF_2": half_2,
        "REST": rest,
        "REST_2": rest_2,
        "TOKENS": tokens,
        "num_warps": min(max(1, tokens * heads_2 * half_2 // (32 * PAIRS_PER_THREAD)), 16),
    }


def _out_of_place(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    q_out, k_out = _fake(q, k, cos, sin, interleaved, inverse)
    _launch(q, k, q_out, k_out, cos, sin, interleaved, inverse)
    return q_out, k_out


def _fake(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> tuple[Tensor, Tensor]:
    return _projected_like(q), _projected_like(k)


def _projected_like(x: Tensor) -> Tensor:
    """An empty [B, heads, T, D] in the memory order of projections, [B, T, heads, D], for any order of x.

    Gradients arrive in the memory order of attention's backward; writing them in the projections' order saves a copy.
    """
    B, heads, T, D = x.shape
    return x.new_empty((B, T, heads, D)).transpose(1, 2)


def _in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    _launch(q, k, q, k, cos, sin, interleaved, False)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.inverse = interleaved, inverse
        with below_autograd():
            return _rope(q, k, cos, sin, interleaved, inverse)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        # Not in place: a gradient may be used elsewhere, and in place would be no faster.
        return *_rope(dq, dk, *ctx.saved_tensors, ctx.interleaved, not ctx.inverse), None, None, None, None


class _RopeInPlace(torch.autograd.Function):
    """Rotates in place and returns aliases of q and k, without `mark_dirty`, for which autograd would copy views.

    Raising the tensors' versions is enough for operations that saved them to notice.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        _rope_(q, k, cos, sin, interleaved)
        torch.autograd.graph.increment_version((q, k))
        return q.detach(), k.detach()

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        return *_rope(dq, dk, *ctx.saved_tensors, ctx.interleaved, True), None, None, None


_rope_ = operator(
    "rope_(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin, bool interleaved) -> ()",
    _in_place,
    lambda q, k, cos, sin, interleaved: None,
)
_rope = operator(
    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, bool inverse) -> (Tensor, Tensor)",
    _out_of_place,
    _fake,
    _Rope,
)
