"""Attention: one entry point for causal, windowed, soft-capped and packed-document attention with grouped heads.

PyTorch's fused backends (cuDNN, FlashAttention, memory efficient) do plain causal attention. FlexAttention and our
kernel also do windows, packed documents and soft caps without a T × T mask. "auto" chooses by a rule, not by timing:

- plain causal attention: PyTorch's SDPA, which takes cuDNN on Hopper;
- windows, documents, soft caps: our Triton kernel;
- our kernel too where SDPA has no fused kernel and would hold all T × T scores: grouped heads in float32, or on cards
  before Ampere; and with `torch.use_deterministic_algorithms(True)`, as ours gives the same bits every time.

Timing every backend at a shape's first call chose as the rule does on each of the seven shapes measured on an H200
(attention rows of benchmarks/results/kernels.csv): cuDNN for the six plain ones, ours for the windowed one. It took up
to 4.6 s, about 9 more to compile FlexAttention, and could choose differently from run to run. So the rule is all.
"""

from functools import lru_cache
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tightfit.errors import UserError
from tightfit.kernels.attention.attention_mask import AttentionMask
from tightfit.kernels.attention.flash_attention import LARGEST_HEAD, flash_attention
from tightfit.kernels.attention.flash_blocks import capability
from tightfit.kernels.triton_support import use_triton

__all__ = ["AttentionImpl", "AttentionMask", "attention", "attention_backend", "attention_eager"]

Backend = Literal["sdpa", "cudnn", "flash", "efficient", "flex", "triton", "eager"]
AttentionImpl = Literal["auto", "sdpa", "cudnn", "flash", "efficient", "flex", "triton", "eager"]
SDPA_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    impl: AttentionImpl = "auto",
) -> Tensor:
    """softmax(cap(scale · QKᵀ), masked) V for query [B, heads, Tq, D], key and value [B, kv_heads, Tk, D]."""
    if impl not in get_args(AttentionImpl):
        raise UserError(f"attention is {impl!r}; give one of {', '.join(get_args(AttentionImpl))}")
    window = mask.effective_window(window)
    backend = attention_backend(query, key, mask, window=window, softcap=softcap) if impl == "auto" else impl
    if backend == "eager" or (backend == "sdpa" and softcap is not None):
        return attention_eager(query, key, value, mask.dense(window, explicit=True), scale=scale, softcap=softcap)
    if backend == "triton":
        use_triton("triton", query)
        return flash_attention(query, key, value, scale=scale, window=window, softcap=softcap, bounds=mask.bounds)
    if backend == "flex":
        return _flex_attention(query, key, value, mask, scale=scale, window=window, softcap=softcap)
    if backend == "sdpa":
        return _sdpa(query, key, value, mask, scale=scale, window=window)
    if softcap is not None or not mask.is_causal_only(window):
        raise UserError(
            f"attention is {backend!r}, which does plain causal attention only; use 'triton', 'flex' or 'auto'"
        )
    if backend == "efficient":  # which does not group heads itself
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    with sdpa_kernel(SDPA_BACKENDS[backend]):
        return _sdpa(query, key, value, mask, scale=scale, window=window)


def attention_backend(
    query: Tensor, key: Tensor, mask: AttentionMask, *, window: int | None = None, softcap: float | None = None
) -> Backend:
    """The backend impl="auto" takes for these tensors, by the rule in the module docstring."""
    if not use_triton("auto", query) or query.shape[3] > LARGEST_HEAD or mask.queries == 1:
        return "sdpa"
    if torch.are_deterministic_algorithms_enabled():
        return "triton"
    plain = softcap is None and mask.is_causal_only(window)
    return "sdpa" if plain and _sdpa_is_fused(query, key) else "triton"


def _sdpa_is_fused(query: Tensor, key: Tensor) -> bool:
    """Whether SDPA does plain causal attention without holding all scores: FlashAttention's cards and dtypes, or heads
    that are not grouped."""
    return query.shape[1] == key.shape[1] or (query.dtype != torch.float32 and capability(query.device) >= 8)


def attention_eager(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scale: float, softcap: float | None = None
) -> Tensor:
    """The reference: scores in full, softmax in float32 or better."""
    B, heads, T, D = query.shape
    grouped = query.view(B, key.shape[1], -1, T, D)  # [B, kv_heads, group, T, D]
    scores = grouped @ key.unsqueeze(2).transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask.unsqueeze(1), float("-inf"))
    weights = scores.softmax(-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
    return (weights @ value.unsqueeze(2)).view(B, heads, T, D)


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, *, scale: float, window: int | None
) -> Tensor:
    dense = mask.dense(window)
    causal = dense is None and mask.is_square
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=dense, is_causal=causal, scale=scale, enable_gqa=grouped
    )


@lru_cache
def _flex(compiled: bool) -> Any:
    """FlexAttention, a template that torch.compile turns into a kernel; uncompiled, as on CPUs, a slow reference."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if compiled else flex_attention


@lru_cache
def _score_cap(softcap: float | None) -> Any:
    """The score_mod of a soft cap: one function per cap, as torch.compile caches per function."""
    if softcap is None:
        return None
    return lambda score, *_: softcap * torch.tanh(score / softcap)


def _flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    if not mask.is_square:
        raise UserError("attention is 'flex', which is not set up for a key/value cache; use 'triton' or 'auto'")
    return _flex(query.is_cuda)(
        query,
        key,
        value,
        score_mod=_score_cap(softcap),
        block_mask=mask.block_mask(window),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
