"""Attention to some of the keys, with the logsumexp that joins it to attention to the others.

Where keys come a part at a time (parallel/ring.py), every part gives an output O and the logsumexp L of its scores, and

    L = log(e^L₁ + e^L₂),   O = e^(L₁−L) O₁ + e^(L₂−L) O₂

is attention to both, exactly (Milakov and Gimelshein 2018; Dao et al. 2022; join_parts.py). Backward needs no such
formula: given the logsumexp and the output over all keys, a part's backward gives its summands of dQ, dK and dV.

Query i sees the keys [first_i, i] of the same tokens (`causal`), or [first_i, end) of others; `first` is where windows
and packed documents begin, and never falls from one query to the next. The kernel is chosen by a rule:

- plain parts: torch's cuDNN attention on cards that have it, else its FlashAttention-2;
- windows, documents, soft caps and what those two refuse: our Triton kernels;
- CPUs: the scores in full, the reference for both.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from tightfit.kernels.attention.flash_attention import LARGEST_HEAD, attend, like_rows
from tightfit.kernels.attention.flash_attention_backward import attend_backward
from tightfit.kernels.attention.flash_blocks import Problem, capability, passes
from tightfit.kernels.operators import on_device_of
from tightfit.kernels.triton_support import use_triton

aten = torch.ops.aten
LN2 = math.log(2)
Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Part:
    """Which keys of a part of all keys the queries see, and how scores are scaled and capped."""

    scale: float
    softcap: float | None = None
    causal: bool = False
    """Whether the keys are those of the queries' own tokens; otherwise they are of earlier tokens."""
    first: Tensor | None = None
    """The first key of every query, int32 [B, queries]; None: all from the first on."""
    keys: int = 0
    """Number of keys of the part; needed where `first` is given."""

    @cached_property
    def ends(self) -> Tensor | None:
        """For every key the first query that no longer sees it, int32 [B, keys]."""
        if self.first is None:
            return None
        at = torch.arange(self.keys, device=self.first.device, dtype=torch.int32).expand(len(self.first), -1)
        return torch.searchsorted(self.first, at.contiguous(), right=True, out_int32=True)

    def problem(self, keys: int) -> Problem:
        """The part as our Triton kernels take it."""
        bounds = None if self.first is None or self.ends is None else (self.first, self.ends)
        return Problem(self.scale, 0, self.softcap or 0.0, bounds, before=0 if self.causal else keys)

    def dense(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """True where a query sees a key, [B or 1, 1, 1, queries, keys]; None where all do."""
        if not self.causal and self.first is None:
            return None
        key = torch.arange(keys, device=device)
        seen = key <= (torch.arange(queries, device=device)[:, None] if self.causal else keys)
        if self.first is not None:
            seen = seen & (key >= self.first[:, :, None])
        return seen.view(-1, 1, 1, queries, keys) if self.first is not None else seen


def attend_part(query: Tensor, key: Tensor, value: Tensor, part: Part) -> tuple[Tensor, Tensor]:
    """Attention of query [B, heads, Tq, D] to key, value [B, kv_heads, Tk, D], and its logsumexp [B, heads, Tq].

    A query that sees none of the keys has a logsumexp so low that its output, whatever it is, counts for nothing.
    """
    match _backend(query, key, value, part):
        case "cudnn":
            found = aten._scaled_dot_product_cudnn_attention(
                query, key, value, None, True, 0.0, part.causal, False, scale=part.scale
            )
            return found[0], found[1].view(query.shape[:3])
        case "flash":
            found = aten._scaled_dot_product_flash_attention(
                query, key, value, 0.0, part.causal, False, scale=part.scale
            )
            return found[0], found[1]
        case "triton":
            blocks = passes(query.shape[3], query.dtype, capability(query.device)).forward
            with on_device_of(query):
                out, logs = attend(query, key, value, part.problem(key.shape[2]), blocks)
            return out, logs * LN2
    return attend_part_eager(query, key, value, part)


def attend_part_backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logs: Tensor, part: Part
) -> Gradients:
    """A part's summands of dQ, dK and dV; `out` and `logs` are those of all keys."""
    match _backend(query, key, value, part):
        case "cudnn":
            return _cudnn_backward(d_out, query, key, value, out, logs, part)
        case "flash":
            return _flash_backward(d_out, query, key, value, out, logs, part)
        case "triton":
            gradients = like_rows(query), like_rows(key), like_rows(value)
            with on_device_of(query):
                problem = part.problem(key.shape[2])
                attend_backward(d_out, query, key, value, out, (logs / LN2).contiguous(), problem, gradients)
            return gradients
    return attend_part_backward_eager(d_out, query, key, value, out, logs, part)


def _backend(query: Tensor, key: Tensor, value: Tensor, part: Part) -> str:
    if not use_triton("auto", query):
        return "eager"
    plain = part.softcap is None and part.first is None
    if not plain or torch.are_deterministic_algorithms_enabled():
        return "triton"
    backends: Any = torch.backends.cuda
    asked = backends.SDPAParams(query, key, value, None, 0.0, part.causal, query.shape[1] != key.shape[1])
    if capability(query.device) >= 9 and backends.can_use_cudnn_attention(asked):
        return "cudnn"
    if backends.can_use_flash_attention(asked) and query.shape[3] % 8 == 0:
        return "flash"
    return "triton" if query.shape[3] <= LARGEST_HEAD else "eager"


@lru_cache
def _unused_seed(device: torch.device) -> tuple[Tensor, Tensor]:
    """Seed and offset of dropout's random numbers, of which none are drawn here."""
    return torch.zeros((), dtype=torch.int64, device=device), torch.zeros((), dtype=torch.int64, device=device)


def _cudnn_backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logs: Tensor, part: Part
) -> Gradients:
    seed, offset = _unused_seed(query.device)
    found = aten._scaled_dot_product_cudnn_attention_backward(
        d_out,
        query,
        key,
        value,
        out,
        logs.contiguous()[..., None],
        seed,
        offset,
        None,
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        part.causal,
        scale=part.scale,
    )
    return found[0], found[1], found[2]


def _flash_backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logs: Tensor, part: Part
) -> Gradients:
    seed, offset = _unused_seed(query.device)
    found = aten._scaled_dot_product_flash_attention_backward(
        d_out,
        query,
        key,
        value,
        out,
        logs.contiguous(),
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        part.causal,
        seed,
        offset,
        scale=part.scale,
    )
    return found[0], found[1], found[2]


def attend_part_eager(query: Tensor, key: Tensor, value: Tensor, part: Part) -> tuple[Tensor, Tensor]:
    """The reference: scores in full, in float32 or better."""
    scores, _ = _scores(query, key, part)
    logs = scores.logsumexp(-1)
    weights = (scores - logs.clamp(min=torch.finfo(logs.dtype).min)[..., None]).exp()
    out = weights.to(value.dtype) @ value.unsqueeze(2)
    return out.reshape(query.shape), logs.reshape(query.shape[:3])


def attend_part_backward_eager(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logs: Tensor, part: Part
) -> Gradients:
    """The reference: dS = P (dO Vᵀ − Σ dO O) (1 − tanh²), with P = e^(S − L)."""
    kv_heads = key.shape[1]
    scores, slope = _scores(query, key, part)
    weights = (scores - logs.unflatten(1, (kv_heads, -1))[..., None]).exp()
    given, q = (heads.unflatten(1, (kv_heads, -1)).to(weights.dtype) for heads in (d_out, query))
    k, v = (heads.unsqueeze(2).to(weights.dtype) for heads in (key, value))
    delta = (d_out.to(weights.dtype) * out.to(weights.dtype)).sum(-1).unflatten(1, (kv_heads, -1))
    d_scores = weights * (given @ v.transpose(-1, -2) - delta[..., None]) * part.scale
    if slope is not None:
        d_scores = d_scores * slope
    d_query = (d_scores @ k).reshape(query.shape)
    d_key, d_value = (d_scores.transpose(-1, -2) @ q).sum(2), (weights.transpose(-1, -2) @ given).sum(2)
    return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype)


def _scores(query: Tensor, key: Tensor, part: Part) -> tuple[Tensor, Tensor | None]:
    """[B, kv_heads, group, Tq, Tk], −∞ where a key is not seen; and 1 − tanh² where scores are capped."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    grouped = query.unflatten(1, (key.shape[1], -1)).to(dtype)
    scores, slope = grouped @ key.unsqueeze(2).transpose(-1, -2).to(dtype) * part.scale, None
    if part.softcap is not None:
        tanh = torch.tanh(scores / part.softcap)
        scores, slope = tanh * part.softcap, 1 - tanh * tanh
    seen = part.dense(query.shape[2], key.shape[2], query.device)
    return scores if seen is None else scores.masked_fill(~seen, float("-inf")), slope
