"""Multi-head latent attention (MLA, DeepSeek-V2, 2024): queries, keys and values from a small latent vector per token.

    [c, r] = x · W_kv_a          c of kv_rank numbers, r of rope_dim
    k_h = [norm(c) · W_k_h, rope(r)],   v_h = norm(c) · W_v_h,   q_h = [q_h, rope(q'_h)]

All heads share the rotated part of a key. Rope's pairs are neighbours in the stored weights (x₀ x₁, x₂ x₃, …), but half
the rotated part apart for `rope`, so queries and keys are reordered alike, which leaves their products unchanged.
Attention itself is that of every other family, over heads of `head_dim`; values are narrower and padded with zeros for
it. A cache of latent vectors [norm(c), rope(r)] (serve/cache/latent.py) is given these and the weights that expand
them into keys and values (`Expansion`). Limits: the cache of one generation (cache.py) holds expanded keys and values;
heads are not split over tensor ranks.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.kernels.attention.rope import rope
from tightfit.models.layers.norm import RmsNorm
from tightfit.models.spec import ModelSpec

if TYPE_CHECKING:
    from tightfit.models.decoder import ForwardContext, Implementations

NORM_EPS = 1e-6
"""ε of the norms of latent vectors, whatever the model's own is."""


@dataclass(frozen=True)
class Expansion:
    """The weights that expand a token's latent vector [norm(c), rope(r)] into keys and values."""

    keys: Tensor
    """[heads, head_dim − rope_dim, kv_rank]"""
    values: Tensor
    """[heads, value_dim, kv_rank]"""

    def expanded(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and padded values, [B, heads, T, head_dim], of latent vectors [B, T, kv_rank + rope_dim]."""
        compressed, rotated = vectors.split([self.keys.shape[2], vectors.shape[2] - self.keys.shape[2]], dim=-1)
        key, value = (compressed[:, None] @ weight.mT for weight in (self.keys, self.values))
        key = torch.cat([key, rotated[:, None].expand(-1, key.shape[1], -1, -1)], dim=-1)
        return key, F.pad(value, (0, key.shape[3] - value.shape[3]))


class AttendLatent(Protocol):
    """Replaces the latent attention of layers, for a cache that keeps the latent vectors of tokens."""

    def __call__(self, layer: int, query: Tensor, vectors: Tensor, expansion: Expansion, *, scale: float) -> Tensor:
        """Attention [B, heads, T, value_dim] of query [B, heads, T, head_dim]; `vectors` [B, T, …] are the new ones."""


class LatentAttention(nn.Module):
    """Attention of one layer of a model with `spec.latent`."""

    def __init__(self, spec: ModelSpec, layer: int, impl: "Implementations") -> None:
        super().__init__()
        latent = spec.latent
        assert latent is not None
        self.layer, self.impl, self.latent, self.head_dim = layer, impl, latent, spec.head_dim
        self.window, self.rope, self.softcap = spec.window_of(layer), spec.rope_of(layer), spec.attention_softcap
        self.scale = spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
        self.sinks = None
        hidden, rank, biased = spec.hidden_size, latent.query_rank, spec.qkv_bias
        self.q = None if rank else nn.Linear(hidden, spec.query_size, bias=False)
        self.q_a = nn.Linear(hidden, rank, bias=biased) if rank else None
        self.q_a_norm = RmsNorm(rank, NORM_EPS, 0.0, impl.norm) if rank else None
        self.q_b = nn.Linear(rank, spec.query_size, bias=False) if rank else None
        self.kv_a = nn.Linear(hidden, latent.kv_rank + latent.rope_dim, bias=biased)
        self.kv_a_norm = RmsNorm(latent.kv_rank, NORM_EPS, 0.0, impl.norm)
        per_head = spec.head_dim - latent.rope_dim + latent.value_dim
        self.kv_b = nn.Linear(latent.kv_rank, spec.heads * per_head, bias=False)
        self.o = nn.Linear(spec.output_size, hidden, bias=spec.output_bias)

    def forward(self, x: Tensor, ctx: "ForwardContext") -> Tensor:
        query, compressed, rotated = self._project(x, ctx)
        if ctx.attend_latent is not None:
            vectors = torch.cat([compressed, rotated[:, 0]], dim=-1)
            attended = ctx.attend_latent(self.layer, query, vectors, self._expansion(), scale=self.scale)
        else:
            key, value = self._expanded(compressed, rotated)
            attended = ctx.attended(self, query, key, value)[..., : self.latent.value_dim]
        return self.o(attended.transpose(1, 2).flatten(2))

    def _project(self, x: Tensor, ctx: "ForwardContext") -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, heads, T, head_dim], norm(c) [B, T, kv_rank] and the rotated part of keys [B, 1, T, rope_dim]."""
        latent, plain = self.latent, self.head_dim - self.latent.rope_dim
        query = self._queries(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        compressed, key_rope = self.kv_a(x).split([latent.kv_rank, latent.rope_dim], dim=-1)
        query, query_rope = query.split([plain, latent.rope_dim], dim=-1)
        query_rope, key_rope = _as_halves(query_rope), _as_halves(key_rope[:, None])
        if self.rope is not None:
            cos, sin = ctx.rope_tables[self.rope]
            query_rope, key_rope = rope(query_rope, key_rope, cos, sin, impl=self.impl.rope)
        return torch.cat([query, query_rope], dim=-1), self.kv_a_norm(compressed.contiguous()), key_rope

    def _expanded(self, compressed: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and padded values, [B, heads, T, head_dim] each."""
        latent, plain = self.latent, self.head_dim - self.latent.rope_dim
        expanded = self.kv_b(compressed).unflatten(-1, (-1, plain + latent.value_dim)).transpose(1, 2)
        key, value = expanded.split([plain, latent.value_dim], dim=-1)
        key = torch.cat([key, rotated.expand(-1, key.shape[1], -1, -1)], dim=-1)
        return key, F.pad(value, (0, self.head_dim - latent.value_dim))

    def _expansion(self) -> Expansion:
        plain = self.head_dim - self.latent.rope_dim
        by_head = self.kv_b.weight.unflatten(0, (-1, plain + self.latent.value_dim))
        return Expansion(keys=by_head[:, :plain], values=by_head[:, plain:])

    def _queries(self, x: Tensor) -> Tensor:
        if self.q is not None:
            return self.q(x)
        assert self.q_a is not None
        assert self.q_a_norm is not None
        assert self.q_b is not None
        return self.q_b(self.q_a_norm(self.q_a(x)))


def _as_halves(x: Tensor) -> Tensor:
    """x₀ x₁ x₂ x₃ … → x₀ x₂ … x₁ x₃ …"""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
