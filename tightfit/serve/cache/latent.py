"""The paged cache of latent attention (DeepSeek): one small vector a token and layer, and attention over those.

Keys and values of all heads are made of [norm(c), rope(r)], kv_rank + rope_dim numbers: 576 in DeepSeek-V3, where keys
and values of all heads are 49 152. Two ways to attend, the same numbers but for rounding:

- one token: the weights that make keys are multiplied into the query, those that make values into the output, and
  attention is over the vectors themselves, which all heads share (DeepSeek-V2, 2024, "absorbed"):

      q_h · k_h = (q_h W_k_h) · c + q'_h · r        o_h = W_v_h Σ_t p_t c_t

- pieces of prompts: keys and values are expanded for the length of a layer, as in training, which is less work where
  there are many queries.

Blocks are gathered, as the vectors are wider than the paged kernels take. Adapters (LoRA) of W_k and W_v are refused.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.kernels.attention.attention import attention
from tightfit.models.layers.latent_attention import Expansion
from tightfit.serve.cache.paged import PagedCache
from tightfit.serve.schedule.step import Step


class LatentCache(PagedCache):
    """Latent vectors of all layers in `blocks` blocks."""

    @property
    def has_row_kernel(self) -> bool:
        """Whether there is a kernel that attends row by row: none for latent attention."""
        return False

    def attend_latent(
        self, layer: int, query: Tensor, vectors: Tensor, expansion: Expansion, *, scale: float
    ) -> Tensor:
        """Store the latent vectors [1, N, …] of the step's tokens; attention [1, heads, N, value_dim] of their query
        [1, heads, N, D]."""
        step = self.step
        assert step is not None, "a step has to be set before layers run"
        vectors = self._store(layer, 0, step, vectors[:, None])[:, 0]
        if step.row_by_row:
            return self._latent_rows(step, query[0], layer, expansion, scale)
        parts = []
        if step.decode_tokens:
            parts.append(self._latent_singles(step, query[0, :, : step.decode_tokens], layer, expansion, scale))
        parts += [self._latent_pieces(step, group, query, vectors, layer, expansion, scale) for group in step.groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _latent_singles(self, step: Step, query: Tensor, layer: int, expansion: Expansion, scale: float) -> Tensor:
        """Attention of the single tokens' queries [heads, singles, D] over the vectors themselves."""
        found = self._gathered(layer, 0, step.tables, step.longest)[:, :, 0]  # [singles, positions, …]
        return _absorbed(query, found, expansion, step.single_mask(None), scale)

    def _latent_rows(self, step: Step, query: Tensor, layer: int, expansion: Expansion, scale: float) -> Tensor:
        """Attention of queries [heads, N, D], each computed by itself as in PagedCache.attend_rows."""
        rows: list[Tensor] = []
        for table, lengths in step.runs:
            found = self._gathered(layer, 0, table, max(lengths))[:, :, 0]
            for length in lengths:
                own = query[:, len(rows), None].contiguous()
                rows.append(_absorbed(own, found[:, :length], expansion, None, scale))
        rows += [torch.zeros_like(rows[0])] * (query.shape[1] - step.decode_tokens)
        return torch.cat(rows, dim=2)

    def _latent_pieces(
        self, step: Step, group: range, query: Tensor, vectors: Tensor, layer: int, expansion: Expansion, scale: float
    ) -> Tensor:
        """Attention of the pieces of a group, as PagedCache._pieces: [1, heads, tokens, value_dim]."""
        piece, count, rows = step.pieces[group.start], len(group), step.rows_of(group)
        own = vectors[0, rows].unflatten(0, (count, -1))
        if piece.before:
            own = self._gathered(layer, 0, step.piece_tables[group.start], piece.end)[:, :, 0]
        key, value = expansion.expanded(own)
        queries = query[0, :, rows].unflatten(1, (count, -1)).transpose(0, 1)
        attended = attention(queries, key, value, step.masks[group.start], scale=scale, impl=self.attention)
        return attended[..., : expansion.values.shape[1]].transpose(0, 1).flatten(1, 2)[None]


def _absorbed(query: Tensor, vectors: Tensor, expansion: Expansion, mask: Tensor | None, scale: float) -> Tensor:
    """Attention [1, heads, singles, value_dim] of queries [heads, singles, D] over vectors [singles, positions, …]."""
    rank, plain = expansion.keys.shape[2], expansion.keys.shape[1]
    folded = torch.cat([query[..., :plain] @ expansion.keys, query[..., plain:]], dim=-1)  # [heads, singles, …]
    attended = F.scaled_dot_product_attention(
        folded.transpose(0, 1)[:, None], vectors[:, None], vectors[:, None, :, :rank], attn_mask=mask, scale=scale
    )
    return (attended[:, 0].transpose(0, 1) @ expansion.values.mT)[None]
