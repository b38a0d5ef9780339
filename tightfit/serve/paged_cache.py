"""The paged key/value cache and attention over it.

Keys and values of a layer lie in blocks of `block_size` positions, [blocks, block_size, kv_heads, D], and a sequence's
blocks anywhere among them. A step writes its new positions first. On a GPU single tokens are one kernel over block
tables (kernels/paged_attention.py); elsewhere their blocks are gathered, and the queries of one group of heads are the
rows of one product. Pieces of prompts that begin at position 0 have all their keys in the step; others gather.

Windowed layers keep all positions: blocks are shared by all layers, and one table serves them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.kernels.attention import AttentionImpl, attention, attention_eager
from tightfit.kernels.paged_attention import paged_attention
from tightfit.kernels.triton_support import Impl, use_triton
from tightfit.models.spec import ModelSpec
from tightfit.serve.step import Step


class PagedCache:
    """Keys and values of `blocks` blocks for all layers, and how layers attend over them in the step that is set."""

    def __init__(
        self,
        spec: ModelSpec,
        blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        impl: Impl = "auto",
    ) -> None:
        shape = (spec.layers, 2, blocks + 1, block_size, spec.kv_heads, spec.head_dim)  # the last is for padding
        self.storage = torch.zeros(shape, device=device, dtype=dtype)  # zeros: what nobody wrote is masked, not NaN
        self.block_size, self.impl = block_size, impl
        self.attention: AttentionImpl = "auto"
        self.step: Step | None = None

    @property
    def bytes(self) -> int:
        """What it takes."""
        return self.storage.numel() * self.storage.element_size()

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Attention of query [1, heads, N, D] of the step's tokens, whose key, value [1, kv_heads, N, D] are stored."""
        step = self.step
        assert step is not None, "a step has to be set before layers run"
        keys, values = self.storage[layer, 0], self.storage[layer, 1]
        keys.flatten(0, 1).index_copy_(0, step.slots, key[0].transpose(0, 1))
        values.flatten(0, 1).index_copy_(0, step.slots, value[0].transpose(0, 1))
        made = []
        if step.singles:
            rows = query[0, :, : step.singles].transpose(0, 1)  # [singles, heads, D]
            single = self._singles(step, rows, keys, values, scale, window, softcap)
            made.append(single.transpose(0, 1)[None])
        for group in step.groups:
            made.append(self._pieces(step, group, query, key, value, layer, scale, window, softcap))
        return made[0] if len(made) == 1 else torch.cat(made, dim=2)

    def _singles(
        self,
        step: Step,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Attention of one query each, [singles, heads, D], over the blocks of their tables."""
        if use_triton(self.impl, query):
            return paged_attention(
                query, keys, values, step.tables, step.lengths, scale=scale, window=window, softcap=softcap
            )
        count, heads, D = query.shape
        found = (self._gathered(part, step.tables, step.longest) for part in (keys, values))
        key, value = (part.transpose(1, 2) for part in found)  # [singles, kv_heads, keys, D]
        mask = step.single_mask(window)
        if softcap is not None:
            return attention_eager(query[:, :, None], key, value, mask, scale=scale, softcap=softcap)[:, :, 0]
        grouped = query.reshape(count, key.shape[1], -1, D)
        return F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale).reshape(count, heads, D)

    def _pieces(
        self,
        step: Step,
        group: range,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: int,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Attention of pieces of one length at once, or of one that has positions before it: [1, heads, tokens, D]."""
        piece, count = step.pieces[group.start], len(group)
        rows = slice(piece.at, piece.at + count * piece.count)
        own_query, own_key, own_value = (_apart(part[0, :, rows], count) for part in (query, key, value))
        if piece.before:
            table = step.piece_tables[group.start]
            both = (self._gathered(self.storage[layer, part], table, piece.end) for part in (0, 1))
            own_key, own_value = (part.transpose(1, 2) for part in both)
        made = attention(
            own_query,
            own_key,
            own_value,
            step.masks[group.start],
            scale=scale,
            window=window,
            softcap=softcap,
            impl=self.attention,
        )
        return made.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]

    def _gathered(self, part: Tensor, tables: Tensor, longest: int) -> Tensor:
        """The positions of blocks in `tables` [n, blocks] one after the other, [n, longest, kv_heads, D]."""
        blocks = -(-longest // self.block_size)
        if tables.shape[0] == 1:
            found = part.index_select(0, tables[0, :blocks])[None]
        else:
            found = part[tables[:, :blocks].long()]
        return found.flatten(1, 2)[:, :longest]


def _apart(x: Tensor, count: int) -> Tensor:
    """[heads, count · T, D] as [count, heads, T, D]."""
    return x.transpose(0, 1).unflatten(0, (count, -1)).transpose(1, 2)
