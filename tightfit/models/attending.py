"""Attention of a layer's queries to keys that are all there, with sinks or without: what layers do with no cache, and
what those who keep keys and values elsewhere (parallel/context.py, serve/cache/paged.py) do with the keys they have."""

from typing import NotRequired, TypedDict, Unpack

from torch import Tensor

from tightfit.kernels.attention import AttentionImpl, AttentionMask, attention
from tightfit.kernels.sink_attention import sink_attention


class AttentionSettings(TypedDict):
    """How a layer's queries and keys make weights; whoever takes a layer's attention takes these on as they are."""

    scale: float
    window: int | None
    softcap: NotRequired[float | None]
    sinks: NotRequired[Tensor | None]
    """A score of each head that stands beside the keys' and has no value."""


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
