"""Attention with sinks (gpt-oss, 2025): each head has a logit s that takes part in the softmax and has no value.

    P = e^S / (Σ e^S + e^s) = e^(S − L'),   L' = log(e^L + e^s),   O' = e^(L − L') O

where L is the logsumexp of the scores and O plain attention. So any kernel that gives O and L does it
(partial_attention.py): forward is its output times a number per row. Backward needs no other kernel either. With P the
softmax above and D = Σ dO' · O', the scores' gradient is P (dO' Vᵀ − D) as ever, so the plain backward is called with
O' and L' in the place of O and L; the sink's own score has the value 0:

    ds = −Σ_rows e^(s − L') D

Kept for backward: query, key, value, O' and L', as plain attention keeps O and L. With a key/value cache, where queries
are fewer than keys, scores are computed in full.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tightfit.kernels.attention.attention_mask import AttentionMask
from tightfit.kernels.attention.flash_attention import like_rows
from tightfit.kernels.attention.partial_attention import Part, attend_part, attend_part_backward
from tightfit.kernels.operators import operator


def sink_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    mask: AttentionMask,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attention of query [B, heads, Tq, D] to key, value [B, kv_heads, Tk, D] with sinks [heads]."""
    if not mask.is_square:
        return sink_attention_eager(query, key, value, sinks, mask.dense(window, explicit=True), scale=scale)
    first = None
    if not mask.is_causal_only(window):
        first = mask.first_of_rows(window, len(query))
    out: Tensor = _SinkAttention.apply(query, key, value, sinks, first, scale)
    return out


def sink_attention_eager(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor | None, *, scale: float
) -> Tensor:
    """The reference: the sink is one more column of the scores, which are computed in full."""
    kv_heads, dtype = key.shape[1], torch.promote_types(query.dtype, torch.float32)
    grouped = query.unflatten(1, (kv_heads, -1))
    scores = (grouped @ key.unsqueeze(2).transpose(-1, -2)).to(dtype) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask.unsqueeze(1), float("-inf"))
    column = sinks.to(dtype).view(1, kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    return (weights.to(value.dtype) @ value.unsqueeze(2)).flatten(1, 2)


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, first: Tensor | None, scale: float
    ) -> Tensor:
        out, logs = _attend(query, key, value, sinks, first, scale)
        ctx.save_for_backward(query, key, value, sinks, out, logs)
        ctx.first, ctx.scale = first, scale  # `first` is the mask's, shared by all layers with this window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, logs = ctx.saved_tensors
        gradients = _attend_backward(d_out, query, key, value, sinks, out, logs, ctx.first, ctx.scale)
        return *gradients, None, None


def _part(key: Tensor, first: Tensor | None, scale: float) -> Part:
    return Part(scale, causal=True, first=first, keys=key.shape[2])


def _run(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, first: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    plain, plain_logs = attend_part(query, key, value, _part(key, first, scale))
    logs = torch.logaddexp(plain_logs, sinks.to(plain_logs.dtype).view(1, -1, 1))
    return torch.mul(plain, (plain_logs - logs).exp()[..., None], out=like_rows(query)), logs


def _fake(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return like_rows(query), query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))


def _run_backward(
    d_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    out: Tensor,
    logs: Tensor,
    first: Tensor | None,
    scale: float,
) -> tuple[Tensor, ...]:
    gradients = attend_part_backward(d_out, query, key, value, out, logs, _part(key, first, scale))
    share = (sinks.to(logs.dtype).view(1, -1, 1) - logs).exp()
    d_sinks = -(share * (d_out.to(logs.dtype) * out.to(logs.dtype)).sum(-1)).sum((0, 2))
    return *gradients, d_sinks.to(sinks.dtype)


def _fake_backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return like_rows(query), like_rows(key), like_rows(value), torch.empty_like(sinks)


_attend = operator(
    "sink_attention(Tensor query, Tensor key, Tensor value, Tensor sinks, Tensor? first, float scale) "
    "-> (Tensor, Tensor)",
    _run,
    _fake,
)
_attend_backward = operator(
    "sink_attention_backward(Tensor d_out, Tensor query, Tensor key, Tensor value, Tensor sinks, Tensor out, "
    "Tensor logs, Tensor? first, float scale) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)
