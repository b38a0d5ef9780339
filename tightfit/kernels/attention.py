"""Attention: one entry point for causal, windowed, soft-capped and packed-document attention with grouped heads.

No backend is the fastest everywhere, and few can do everything. PyTorch's fused ones (cuDNN, FlashAttention, the memory
efficient one) do plain causal attention; FlexAttention and our own flash attention also do windows, documents and soft
caps without a T × T mask. "auto" measures those that fit, once per card and class of shapes (attention_choice.py), and
`attention_backend` says which it takes. Where nothing can be measured (CPUs, tracing, simulation), and with "rule"
everywhere, a rule chooses: PyTorch's own choice for plain attention where it has a fused kernel for it, else ours.
(It has none for grouped heads in float32 or on cards before Ampere, where it would hold all T × T scores.)
"""

from functools import lru_cache
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tightfit.errors import UserError
from tightfit.kernels.attention_choice import Asked, chosen
from tightfit.kernels.flash_attention import LARGEST_HEAD, flash_attention
from tightfit.kernels.flash_blocks import capability
from tightfit.kernels.triton_support import use_triton
from tightfit.kernels.visibility import Visibility, documents_between

__all__ = ["AttentionImpl", "Visibility", "attention", "attention_backend", "attention_eager", "documents_between"]

Backend = Literal["sdpa", "cudnn", "flash", "efficient", "flex", "triton", "eager"]
AttentionImpl = Literal["auto", "rule", "sdpa", "cudnn", "flash", "efficient", "flex", "triton", "eager"]
SDPA_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Visibility,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    impl: AttentionImpl = "auto",
) -> Tensor:
    """softmax(cap(scale · QKᵀ) where `visible`) V for query [B, heads, Tq, D], key and value [B, kv_heads, Tk, D]."""
    window = visible.narrowing(window)
    backend: Backend
    if impl == "auto" or impl == "rule":
        backend = _choose(query, key, visible, window, softcap, measuring=impl == "auto")
    else:
        backend = impl
    if backend == "eager" or (backend == "sdpa" and softcap is not None):
        return attention_eager(query, key, value, visible.mask(window, explicit=True), scale=scale, softcap=softcap)
    if backend == "triton":
        use_triton("triton", query)
        return flash_attention(query, key, value, scale=scale, window=window, softcap=softcap, bounds=visible.bounds)
    if backend == "flex":
        return _flex_attention(query, key, value, visible, scale, window, softcap)
    if backend == "sdpa":
        return _sdpa(query, key, value, visible, scale, window)
    if backend not in SDPA_BACKENDS:
        raise UserError(f"attention is {backend!r}; give one of {', '.join(get_args(AttentionImpl))}")
    if softcap is not None or not visible.is_plain(window):
        raise UserError(
            f"attention is {backend!r}, which does plain causal attention only; use 'triton', 'flex' or 'auto'"
        )
    if backend == "efficient":  # which does not group heads itself
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    with sdpa_kernel(SDPA_BACKENDS[backend]):
        return _sdpa(query, key, value, visible, scale, window)


def attention_backend(
    query: Tensor, key: Tensor, visible: Visibility, *, window: int | None = None, softcap: float | None = None
) -> Backend:
    """What impl="auto" takes for tensors like these; asking measures, where that has not been done yet."""
    return _choose(query, key, visible, visible.narrowing(window), softcap, measuring=True)


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


def _sdpa(query: Tensor, key: Tensor, value: Tensor, visible: Visibility, scale: float, window: int | None) -> Tensor:
    mask = visible.mask(window)
    causal = mask is None and visible.is_square
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


@lru_cache
def _flex(compiled: bool) -> Any:
    """FlexAttention is a template: uncompiled it is a slow reference, the only thing CPUs have with gradients."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if compiled else flex_attention


@lru_cache
def _score_cap(softcap: float | None) -> Any:
    """One function per cap, as compiled code is kept per function."""
    if softcap is None:
        return None
    return lambda score, *_: softcap * torch.tanh(score / softcap)


def _flex_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Visibility, scale: float, window: int | None,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    if not visible.is_square:
        raise UserError("attention is 'flex', which is not set up for a key/value cache; use 'triton' or 'auto'")
    grouped = query.shape[1] != key.shape[1]
    return _flex(query.is_cuda)(
        query, key, value, score_mod=_score_cap(softcap), block_mask=visible.block_mask(window), scale=scale,
        enable_gqa=grouped,
    )  # fmt: skip


def _choose(
    query: Tensor, key: Tensor, visible: Visibility, window: int | None, softcap: float | None, *, measuring: bool
) -> Backend:
    """A rule, and a measurement where there are several that it cannot rank."""
    if not (use_triton("auto", query) and query.shape[3] <= LARGEST_HEAD) or visible.queries == 1:
        return "sdpa"
    if torch.are_deterministic_algorithms_enabled():
        return "triton"
    plain = softcap is None and visible.is_plain(window)
    rule: Backend = "sdpa" if plain and _torch_has_a_fused_kernel(query, key) else "triton"
    if not (measuring and visible.is_square and _is_measurable(query)):
        return rule
    asked = Asked.about(query, key, window is not None, softcap is not None, visible.documents is not None)

    def candidate(backend: Backend) -> Any:
        return lambda q, k, v: attention(
            q, k, v, visible, scale=query.shape[3] ** -0.5, window=window, softcap=softcap, impl=backend
        )

    fitting: tuple[Backend, ...] = ("cudnn", "flash", "efficient", "triton") if plain else ("triton", "flex")
    return chosen(asked, {name: candidate(name) for name in fitting}, (query, key), otherwise=rule)


def _torch_has_a_fused_kernel(query: Tensor, key: Tensor) -> bool:
    """Whether SDPA does plain attention without all scores: FlashAttention's cards and dtypes, or ungrouped heads."""
    return query.shape[1] == key.shape[1] or (query.dtype != torch.float32 and capability(query.device) >= 8)


def _is_measurable(x: Tensor) -> bool:
    """Whether work on `x` can be timed: not while tracing, simulating or capturing a graph."""
    real = type(x) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()
    return real and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
