"""The paged key/value cache and attention over it.

Keys and values of a layer lie in blocks of `block_size` positions, [blocks, block_size, kv_heads, D], and a sequence's
blocks anywhere among them. A step writes its new positions first. On a GPU single tokens are one kernel over block
tables (kernels/paged_attention.py) and pieces of prompts another (kernels/paged_prefill.py), whatever their lengths;
whole prompts of round lengths take the library's attention, which is faster and plans for every new shape. Elsewhere
blocks are gathered: the queries of one group of heads are the rows of one product, pieces go one length at a time.

Windowed layers keep all positions: blocks are shared by all layers, and one table serves them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.kernels.attention import AttentionImpl, attention, attention_eager
from tightfit.kernels.attention_mask import AttentionMask
from tightfit.kernels.flash_attention import LARGEST_HEAD
from tightfit.kernels.paged_attention import paged_attention
from tightfit.kernels.paged_prefill import paged_prefill, tile_rows
from tightfit.kernels.sink_attention import sink_attention, sink_attention_eager
from tightfit.kernels.triton_support import Impl, use_triton
from tightfit.memory.formulas.serving import CacheFormat, stored_vectors
from tightfit.models.spec import ModelSpec
from tightfit.serve.cache_format import CODES, as_numbers, decode, encode
from tightfit.serve.step import Piece, Step

ROUND_LENGTHS = frozenset((64, 128, 256, *range(512, 16_385, 512)))


class PagedCache:
    """Keys and values of `blocks` blocks for all layers, and how layers attend over them in the step that is set."""

    def __init__(
        self,
        spec: ModelSpec,
        blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        form: CacheFormat = "model",
        impl: Impl = "auto",
    ) -> None:
        parts, heads, width = stored_vectors(spec)
        shape = (spec.layers, parts, blocks + 1, block_size, heads, width)  # the last block is for padding
        kept = dtype if form == "model" else CODES[form]
        self.storage = torch.zeros(shape, device=device, dtype=kept)  # zeros: what nobody wrote is masked, not NaN
        self.scales = torch.zeros(shape[:-1] if form != "model" else (0,), device=device)
        self.form: CacheFormat = form
        self.dtype = dtype
        self.block_size, self.impl = block_size, impl
        self.attention: AttentionImpl = "auto"
        self.step: Step | None = None

    @property
    def bytes(self) -> int:
        """What it takes."""
        return sum(part.numel() * part.element_size() for part in (self.storage, self.scales))

    @property
    def is_quantized(self) -> bool:
        """Whether keys and values are codes with scales."""
        return self.form != "model"

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
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of query [1, heads, N, D] of the step's tokens, whose key, value [1, kv_heads, N, D] are stored."""
        step = self.step
        assert step is not None, "a step has to be set before layers run"
        key, value = self._store(layer, 0, step, key), self._store(layer, 1, step, value)
        if use_triton(self.impl, query) and query.shape[3] <= LARGEST_HEAD and not self.is_quantized:
            rows = query[0].transpose(0, 1)
            stored = self.attend_stored(step, layer, rows, scale=scale, window=window, softcap=softcap, sinks=sinks)
            return stored.transpose(0, 1)[None]
        made = []
        if step.singles:
            rows = query[0, :, : step.singles].transpose(0, 1)  # [singles, heads, D]
            single = self._singles(step, rows, layer, scale, window, softcap, sinks)
            made.append(single.transpose(0, 1)[None])
        for group in step.groups:
            made.append(self._pieces(step, group, query, key, value, layer, scale, window, softcap, sinks))
        return made[0] if len(made) == 1 else torch.cat(made, dim=2)

    def attend_singles(
        self, step: Step, layer: int, query: Tensor, key_value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """Attention [N, heads, D] of one query each, whose key and value [N, 2, kv_heads, D] are stored: in as few
        operations as torch has for it, since for one token they take longer to call than to compute."""
        own = self.storage[layer]
        own.flatten(1, 2).index_copy_(1, step.slots, key_value.transpose(0, 1))
        count, heads, D = query.shape
        found = own.index_select(1, step.flat_tables).view(2, count, -1, *own.shape[3:])
        key, value = found[:, :, : step.longest].transpose(2, 3).unbind()
        grouped = query.reshape(count, key.shape[1], -1, D)
        mask = step.single_bias(window, query.dtype)
        return F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale).reshape(count, heads, D)

    def _store(self, layer: int, part: int, step: Step, given: Tensor) -> Tensor:
        """Keys or values [1, kv_heads, N, D] into the cache; returned as they will be read from it."""
        rows, places = given[0].transpose(0, 1), self.storage[layer, part].flatten(0, 1)
        if not self.is_quantized:
            places.index_copy_(0, step.slots, rows)
            return given
        codes, scales = encode(rows, self.form)
        places.index_copy_(0, step.slots, codes)
        self.scales[layer, part].flatten(0, 1).index_copy_(0, step.slots, scales)
        return decode(codes, scales, self.form, given.dtype).transpose(0, 1)[None]

    def attend_stored(
        self,
        step: Step,
        layer: int,
        query: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """The same by our kernels, for query [N, heads, D] of tokens whose keys and values are in the cache."""
        keys, values = self.storage[layer, 0], self.storage[layer, 1]
        settings: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
        if not step.pieces:
            return paged_attention(query, keys, values, step.tables, step.lengths, **settings)
        whole = all(_has_round_length(piece) for piece in step.pieces)
        if whole and not step.singles and len(step.groups) == 1:
            return self._whole_prompts(step, step.groups[0], query, keys, values, settings)
        out = torch.empty(query.shape, device=query.device, dtype=query.dtype)
        if step.singles:
            single = query[: step.singles]
            out[: step.singles] = paged_attention(single, keys, values, step.tables, step.lengths, **settings)
        if whole:
            for group in step.groups:
                made = self._whole_prompts(step, group, query, keys, values, settings)
                at = step.pieces[group.start].at
                out[at : at + len(made)] = made
        else:
            paged_prefill(query, keys, values, step.joint_tables, step.tiles(tile_rows(query)), out, **settings)
        return out

    def _whole_prompts(
        self,
        step: Step,
        group: range,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        settings: dict[str, Any],
    ) -> Tensor:
        """Attention [tokens, heads, D] of prompts of one length that begin at position 0, by the fastest there is."""
        piece, count = step.pieces[group.start], len(group)
        rows = slice(piece.at, piece.at + count * piece.count)
        own = (part.flatten(0, 1).index_select(0, step.slots[rows]) for part in (keys, values))
        q, k, v = (part.unflatten(0, (count, -1)).transpose(1, 2) for part in (query[rows], *own))
        made = self._attention(q, k, v, step.masks[group.start], **settings)
        return made.transpose(1, 2).flatten(0, 1)

    def _singles(
        self,
        step: Step,
        query: Tensor,
        layer: int,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention of one query each, [singles, heads, D], over the blocks of their tables."""
        if use_triton(self.impl, query) and self._kernels_read_codes:
            return paged_attention(
                query,
                as_numbers(self.storage[layer, 0], self.form),
                as_numbers(self.storage[layer, 1], self.form),
                step.tables,
                step.lengths,
                scales=self.scales[layer],
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
            )
        count, heads, D = query.shape
        found = (self._gathered(layer, part, step.tables, step.longest) for part in (0, 1))
        key, value = (part.transpose(1, 2) for part in found)  # [singles, kv_heads, keys, D]
        mask = step.single_mask(window)
        if sinks is not None:
            return sink_attention_eager(query[:, :, None], key, value, sinks, mask, scale=scale)[:, :, 0]
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
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention of pieces of one length at once, or of one that has positions before it: [1, heads, tokens, D]."""
        piece, count = step.pieces[group.start], len(group)
        rows = slice(piece.at, piece.at + count * piece.count)
        own_query, own_key, own_value = (_apart(part[0, :, rows], count) for part in (query, key, value))
        if piece.before:
            table = step.piece_tables[group.start]
            both = (self._gathered(layer, part, table, piece.end) for part in (0, 1))
            own_key, own_value = (part.transpose(1, 2) for part in both)
        made = self._attention(
            own_query,
            own_key,
            own_value,
            step.masks[group.start],
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        return made.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: AttentionMask,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        if sinks is not None:
            return sink_attention(query, key, value, sinks, mask, scale=scale, window=window)
        impl = self.attention
        return attention(query, key, value, mask, scale=scale, window=window, softcap=softcap, impl=impl)

    @property
    def _kernels_read_codes(self) -> bool:
        """Whether this GPU's kernels can read the codes: fp8 is known from compute capability 8.9 on."""
        if not self.is_quantized or self.storage.shape[-1] > LARGEST_HEAD:
            return False
        device = self.storage.device
        return self.form == "int8" or device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)

    def _gathered(self, layer: int, part: int, tables: Tensor, longest: int) -> Tensor:
        """The positions of blocks in `tables` [n, blocks] one after the other, [n, longest, kv_heads, D]."""
        tables = tables[:, : -(-longest // self.block_size)]
        found = _selected(self.storage[layer, part], tables)[:, :longest]
        if not self.is_quantized:
            return found
        return decode(found, _selected(self.scales[layer, part], tables)[:, :longest], self.form, self.dtype)


def _selected(part: Tensor, tables: Tensor) -> Tensor:
    """Blocks of `part` [blocks, block_size, …] by tables [n, m], as [n, m · block_size, …]."""
    found = part.index_select(0, tables[0])[None] if tables.shape[0] == 1 else part[tables.long()]
    return found.flatten(1, 2)


def _has_round_length(piece: Piece) -> bool:
    """Whether a piece is a whole prompt of a length that comes again, which a library may plan for: planning takes
    tens of milliseconds, and prompts have all lengths. Those of captured graphs are among them."""
    return piece.before == 0 and piece.count in ROUND_LENGTHS


def _apart(x: Tensor, count: int) -> Tensor:
    """[heads, count · T, D] as [count, heads, T, D]."""
    return x.transpose(0, 1).unflatten(0, (count, -1)).transpose(1, 2)
