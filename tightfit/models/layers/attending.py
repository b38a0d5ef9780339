"""Masked attention of a layer's queries to given keys, with or without sinks: for layers, and for code that keeps keys
and values elsewhere (parallel/context.py, serve/cache/paged.py)."""

from typing import NotRequired, TypedDict, Unpack

from torch import Tensor

from tightfit.kernels.attention.attention import AttentionImpl, AttentionMask, attention
from tightfit.kernels.attention.sink_attention import sink_attention


class AttentionSettings(TypedDict):
    """How a layer turns queries and keys into attention weights; code that replaces its attention has to apply all."""

    scale: float
    window: int | None
    softcap: NotRequired[float | None]
    sinks: NotRequired[Tensor | None]
    """[heads]: a learned score per head in the softmax, beside those of the keys and without a value vector."""


def attend_masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    *,
    impl: AttentionImpl = "auto",
    **settings: Unpack[AttentionSettings],
) -> Tensor:
    """Attention [B, heads, T, D] of query [B, heads, T, D] to key, value [B, kv_heads, keys, D]."""
    scale, window, sinks = settings["scale"], settings["window"], settings.get("sinks")
    if sinks is not None:
        return sink_attention(query, key, value, sinks, mask, scale=scale, window=window)
    return attention(query, key, value, mask, scale=scale, window=window, softcap=settings.get("softcap"), impl=impl)
