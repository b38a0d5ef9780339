"""Attention: one entry point for causal, windowed, soft-capped and packed-document attention with grouped heads.

`Visibility` says which keys a query may see. It is built once per forward and shared by all layers, so a mask,
where one is needed at all, exists once per window size; plain causal attention needs none and takes the fused path.
Softcapping (Gemma-2) changes the scores themselves, which SDPA cannot do: it takes the eager path.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

AttentionImpl = Literal["sdpa", "eager"]


class Visibility:
    """Query i of the last `queries` of `keys` positions sees keys up to its own, in its window and its document."""

    def __init__(self, queries: int, keys: int, device: torch.device, documents: Tensor | None = None) -> None:
        if documents is not None and queries != keys:
            raise ValueError("packed documents and a key/value cache do not go together: documents would be cut")
        self.queries, self.keys, self.device, self.documents = queries, keys, device, documents
        self._masks: dict[int | None, Tensor] = {}

    @property
    def is_square(self) -> bool:
        """Whether every key is also a query (no cache before them)."""
        return self.queries == self.keys

    def mask(self, window: int | None, *, explicit: bool = False) -> Tensor | None:
        """True where a query sees a key, [B or 1, 1, queries, keys].

        None when all keys are seen, and, unless `explicit`, when causality alone decides.
        """
        window = None if window is None or window >= self.keys else window
        implied = self.queries == 1 or (self.is_square and not explicit)
        if window is None and self.documents is None and implied:
            return None
        if window not in self._masks:
            self._masks[window] = self._build(window)
        return self._masks[window]

    def _build(self, window: int | None) -> Tensor:
        key = torch.arange(self.keys, device=self.device)
        query = key[self.keys - self.queries :, None]
        seen = key <= query
        if window is not None:
            seen &= key > query - window
        if self.documents is None:
            return seen[None, None]
        return (seen & (self.documents[:, :, None] == self.documents[:, None, :]))[:, None]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Visibility,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    impl: AttentionImpl = "sdpa",
) -> Tensor:
    """softmax(cap(scale · QKᵀ) where `visible`) V for query [B, heads, Tq, D], key and value [B, kv_heads, Tk, D]."""
    if impl == "eager" or softcap is not None:
        mask = visible.mask(window, explicit=True)
        return attention_eager(query, key, value, mask, scale=scale, softcap=softcap)
    mask = visible.mask(window)
    causal = mask is None and visible.is_square
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


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
