"""The paged key/value cache and attention over it.

Keys and values of a layer lie in blocks of `block_size` positions, [blocks, block_size, kv_heads, D]; a sequence's
blocks may be any of them. A step writes its new positions first. On a GPU single tokens (decoding) take one kernel over
block tables (kernels/decoding/paged_attention.py) and pieces of prompts another (kernels/decoding/paged_prefill.py),
whatever their lengths; whole prompts of round lengths take the library's attention, which is faster but plans for every
new shape. Elsewhere blocks are gathered: query heads of one key head are the rows of one product, and pieces of equal
length run together.

With `windows` (schedule/window_pages.py), layers that have a window keep a page of a block, in storage of their own,
only while a running sequence sees it. A step names blocks; their pages are looked up on the device, once for
all such layers. Without `windows` they keep all positions in blocks, as other layers do.
"""

from typing import Any, Unpack

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.kernels.attention.attention import AttentionImpl, attention_eager
from tightfit.kernels.attention.flash_attention import LARGEST_HEAD
from tightfit.kernels.attention.sink_attention import sink_attention_eager
from tightfit.kernels.decoding.paged_attention import paged_attention
from tightfit.kernels.decoding.paged_prefill import paged_prefill, tile_rows
from tightfit.kernels.triton_support import Impl, use_triton
from tightfit.memory.formulas.serving import CacheFormat, stored_vectors
from tightfit.models.layers.attending import AttentionSettings, attend_masked
from tightfit.models.spec import ModelSpec
from tightfit.serve.cache.codes import CODES, as_numbers, decode, encode
from tightfit.serve.cache.storage import Storage
from tightfit.serve.schedule.device import to_device
from tightfit.serve.schedule.step import Piece, Step

ROW_SPLITS = 8
"""Programs that split the keys of one token in `attend_rows`: as many whatever else is in the batch."""
ROUND_LENGTHS = frozenset((64, 128, 256, *range(512, 16_385, 512)))


class PagedCache:
    """Keys and values of all layers in `blocks` blocks, and attention over them for the tokens of `step`."""

    def __init__(
        self,
        spec: ModelSpec,
        blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        form: CacheFormat = "model",
        impl: Impl = "auto",
        pages: int | None = None,
    ) -> None:
        self.form: CacheFormat = form
        self.dtype, self.device, self.block_size, self.impl = dtype, device, block_size, impl
        self.attention: AttentionImpl = "auto"
        self.step: Step | None = None
        self.padding_block = blocks
        """The block that padding rows write to; it belongs to no sequence."""
        is_windowed = [pages is not None and spec.window_of(layer) is not None for layer in range(spec.layers)]
        self.whole = self._storage(spec, is_windowed.count(False), blocks)
        self.windowed = None if pages is None else self._storage(spec, is_windowed.count(True), pages)
        rows = [is_windowed[:layer].count(own) for layer, own in enumerate(is_windowed)]
        self._rows = list(zip(is_windowed, rows, strict=True))
        """Of each layer, whether it is in `windowed`, and its row in that storage or in `whole`."""
        self._pages = torch.full((blocks + 1,), pages or 0, device=device, dtype=torch.int32)

    def _storage(self, spec: ModelSpec, layers: int, blocks: int) -> Storage:
        parts, heads, width = stored_vectors(spec)
        shape = (layers, parts, blocks + 1, self.block_size, heads, width)  # the last block is for padding
        dtype = self.dtype if self.form == "model" else CODES[self.form]
        return Storage.zeros(shape, dtype, self.device, scaled=self.is_quantized)

    @property
    def bytes(self) -> int:
        """Bytes that the cache takes."""
        return self.whole.bytes + (0 if self.windowed is None else self.windowed.bytes)

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of stored numbers or codes."""
        return self.whole.numbers.dtype

    def set_pages(self, of_block: np.ndarray) -> None:
        """Let the steps launched from now on find the pages that blocks have been given."""
        self._pages.copy_(to_device(of_block, self.device), non_blocking=True)

    def places(self, layer: int, step: Step) -> Step:
        """`step` with the places that `layer` uses: blocks, or their pages."""
        return step.through(self._pages) if self._rows[layer][0] and step.pages is None else step

    def numbers(self, layer: int) -> Tensor:
        """Keys and values of `layer`, [2, blocks or pages, block_size, kv_heads, D]."""
        return self._storage_of(layer).numbers[self._rows[layer][1]]

    def scales(self, layer: int) -> Tensor:
        """Scales of codes of `layer`, [2, blocks or pages, block_size, kv_heads]."""
        return self._storage_of(layer).scales[self._rows[layer][1]]

    def _storage_of(self, layer: int) -> Storage:
        return self.windowed if self.windowed is not None and self._rows[layer][0] else self.whole

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
        **settings: Unpack[AttentionSettings],
    ) -> Tensor:
        """Store key, value [1, kv_heads, N, D] of the step's tokens; attention of their query [1, heads, N, D]."""
        step = self.step
        assert step is not None, "a step has to be set before layers run"
        step = self.places(layer, step)
        key, value = self._store(layer, 0, step, key), self._store(layer, 1, step, value)
        if step.row_by_row:
            rows = query[0].transpose(0, 1)
            return self.attend_rows(step, layer, rows, **settings).transpose(0, 1)[None]
        if use_triton(self.impl, query) and query.shape[3] <= LARGEST_HEAD and not self.is_quantized:
            rows = query[0].transpose(0, 1)
            return self.attend_stored(step, layer, rows, **settings).transpose(0, 1)[None]
        parts = []
        if step.decode_tokens:
            rows = query[0, :, : step.decode_tokens].transpose(0, 1)  # [singles, heads, D]
            parts.append(self._singles(step, layer, rows, **settings).transpose(0, 1)[None])
        for group in step.groups:
            parts.append(self._pieces(step, group, layer, query, key, value, **settings))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def attend_singles(
        self, step: Step, layer: int, query: Tensor, key_value: Tensor, **settings: Unpack[AttentionSettings]
    ) -> Tensor:
        """Store key and value [N, 2, kv_heads, D] of one token of each sequence; attention [N, heads, D] of their
        queries. In as few calls of torch as possible: for one token a call takes longer than its arithmetic."""
        assert not self.is_quantized
        step = self.places(layer, step)
        self.numbers(layer).flatten(1, 2).index_copy_(1, step.slots, key_value.transpose(0, 1))
        return self._singles(step, layer, query, **settings)

    def _store(self, layer: int, part: int, step: Step, new: Tensor) -> Tensor:
        """Write the step's keys or values [1, kv_heads, N, D] to the cache; returns what later steps will read."""
        rows, places = new[0].transpose(0, 1), self.numbers(layer)[part].flatten(0, 1)
        if not self.is_quantized:
            places.index_copy_(0, step.slots, rows)
            return new
        codes, scales = encode(rows, self.form)
        places.index_copy_(0, step.slots, codes)
        self.scales(layer)[part].flatten(0, 1).index_copy_(0, step.slots, scales)
        return decode(codes, scales, self.form, new.dtype).transpose(0, 1)[None]

    def attend_stored(self, step: Step, layer: int, query: Tensor, **settings: Unpack[AttentionSettings]) -> Tensor:
        """Attention by our kernels, for query [N, heads, D] of tokens whose keys and values are in the cache."""
        if step.row_by_row:
            return self.attend_rows(step, layer, query, **settings)
        step, (keys, values) = self.places(layer, step), self.numbers(layer)
        if not step.pieces:
            return paged_attention(query, keys, values, step.tables, step.lengths, **settings)
        whole = all(_has_round_length(piece) for piece in step.pieces)
        if whole and not step.decode_tokens and len(step.groups) == 1:
            return self._whole_prompts(step, step.groups[0], query, keys, values, **settings)
        out = torch.empty(query.shape, device=query.device, dtype=query.dtype)
        if step.decode_tokens:
            single = query[: step.decode_tokens]
            out[: step.decode_tokens] = paged_attention(single, keys, values, step.tables, step.lengths, **settings)
        if whole:
            for group in step.groups:
                out[step.rows_of(group)] = self._whole_prompts(step, group, query, keys, values, **settings)
        else:
            paged_prefill(query, keys, values, step.joint_tables, step.tiles(tile_rows(query)), out, **settings)
        return out

    def attend_rows(self, step: Step, layer: int, query: Tensor, **settings: Unpack[AttentionSettings]) -> Tensor:
        """Batch-invariant attention [N, heads, D] of tokens whose keys and values are in the cache: the order of a
        token's operations depends on how many keys it sees and on nothing else."""
        step = self.places(layer, step)
        if self.has_row_kernel:
            return self._paged_attention(step, layer, query, splits=ROW_SPLITS, **settings)
        window = settings["window"]
        rows: list[Tensor] = []
        for table, lengths in step.runs:
            every = [self._gathered(layer, part, table, max(lengths)) for part in (0, 1)]  # two tensors aligned alike
            for length in lengths:
                first = 0 if window is None else max(0, length - window)
                key, value = (part[:, first:length].transpose(1, 2) for part in every)
                rows.append(_single_attention(query[len(rows), None], key, value, None, **settings)[0])
        rows += [torch.zeros_like(query[0])] * (len(query) - step.decode_tokens)
        return torch.stack(rows)

    @property
    def has_row_kernel(self) -> bool:
        """Whether `attend_rows` is one kernel; else it is a few calls of torch for each token."""
        if not use_triton(self.impl, self.whole.scales) or self._head_dim > LARGEST_HEAD:
            return False
        return not self.is_quantized or self._kernels_read_codes

    def _paged_attention(self, step: Step, layer: int, query: Tensor, **settings: Any) -> Tensor:
        """Attention [N, heads, D] of one query each by our kernel, which reads codes as well."""
        keys, values = self.numbers(layer)
        if self.is_quantized:
            keys, values = (as_numbers(part, self.form) for part in (keys, values))
            settings["scales"] = self.scales(layer)
        return paged_attention(query, keys, values, step.tables, step.lengths, **settings)

    def _whole_prompts(
        self,
        step: Step,
        group: range,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        **settings: Unpack[AttentionSettings],
    ) -> Tensor:
        """Attention [tokens, heads, D] of prompts of one length that begin at position 0, by the fastest library."""
        count, rows = len(group), step.rows_of(group)
        own = (part.flatten(0, 1).index_select(0, step.slots[rows]) for part in (keys, values))
        q, k, v = (part.unflatten(0, (count, -1)).transpose(1, 2) for part in (query[rows], *own))
        attended = attend_masked(q, k, v, step.masks[group.start], impl=self.attention, **settings)
        return attended.transpose(1, 2).flatten(0, 1)

    def _singles(self, step: Step, layer: int, query: Tensor, **settings: Unpack[AttentionSettings]) -> Tensor:
        """Attention of the single tokens' queries [singles, heads, D] over the blocks of their tables."""
        if use_triton(self.impl, query) and self._kernels_read_codes:
            return self._paged_attention(step, layer, query, **settings)
        key, value = self._single_keys_values(step, layer)
        return _single_attention(query, key, value, step, **settings)

    def _single_keys_values(self, step: Step, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the single tokens' sequences, [singles, kv_heads, keys, D] each."""
        found = self.numbers(layer).index_select(1, step.flat_tables)
        if self.is_quantized:
            found = decode(found, self.scales(layer).index_select(1, step.flat_tables), self.form, self.dtype)
        key, value = found.view(2, step.decode_tokens, -1, *found.shape[3:])[:, :, : step.longest].transpose(2, 3)
        return key, value

    def _pieces(
        self,
        step: Step,
        group: range,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **settings: Unpack[AttentionSettings],
    ) -> Tensor:
        """Attention [1, heads, tokens, D] of a group: pieces of one length that begin at position 0, or one piece with
        earlier positions in the cache."""
        piece, count, rows = step.pieces[group.start], len(group), step.rows_of(group)
        own_query, own_key, own_value = (_apart(part[0, :, rows], count) for part in (query, key, value))
        if piece.before:
            table = step.piece_tables[group.start]
            both = (self._gathered(layer, part, table, piece.end) for part in (0, 1))
            own_key, own_value = (part.transpose(1, 2) for part in both)
        attended = attend_masked(
            own_query, own_key, own_value, step.masks[group.start], impl=self.attention, **settings
        )
        return attended.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]

    @property
    def _head_dim(self) -> int:
        return self.whole.numbers.shape[-1]

    @property
    def _kernels_read_codes(self) -> bool:
        """Whether kernels can read the codes here: fp8 from compute capability 8.9 on."""
        if not self.is_quantized or self._head_dim > LARGEST_HEAD:
            return False
        device = self.device
        return self.form == "int8" or device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)

    def _gathered(self, layer: int, part: int, tables: Tensor, longest: int) -> Tensor:
        """The positions of blocks in `tables` [n, blocks] one after the other, [n, longest, kv_heads, D]."""
        tables = tables[:, : -(-longest // self.block_size)]
        found = _selected(self.numbers(layer)[part], tables)[:, :longest]
        if not self.is_quantized:
            return found
        return decode(found, _selected(self.scales(layer)[part], tables)[:, :longest], self.form, self.dtype)


def _single_attention(
    query: Tensor, key: Tensor, value: Tensor, step: Step | None, **settings: Unpack[AttentionSettings]
) -> Tensor:
    """Attention of queries [N, heads, D], one per sequence, over key, value [N, kv_heads, keys, D]: over the keys that
    the single tokens of `step` see, or over all where it is None."""
    scale, window = settings["scale"], settings["window"]
    mask = None if step is None else step.single_mask(window)
    if (sinks := settings.get("sinks")) is not None:
        return sink_attention_eager(query[:, :, None], key, value, sinks, mask, scale=scale)[:, :, 0]
    grouped = query.reshape(len(query), key.shape[1], -1, query.shape[2])  # a group's heads as rows: no key is copied
    if (softcap := settings.get("softcap")) is not None:
        return attention_eager(grouped, key, value, mask, scale=scale, softcap=softcap).reshape(query.shape)
    bias = None if step is None else step.single_bias(window, query.dtype)
    return F.scaled_dot_product_attention(grouped, key, value, attn_mask=bias, scale=scale).reshape(query.shape)


def _selected(part: Tensor, tables: Tensor) -> Tensor:
    """Blocks of `part` [blocks, block_size, …] by tables [n, m], as [n, m · block_size, …]."""
    found = part.index_select(0, tables[0])[None] if tables.shape[0] == 1 else part[tables.long()]
    return found.flatten(1, 2)


def _has_round_length(piece: Piece) -> bool:
    """Whether a piece is a whole prompt of one of ROUND_LENGTHS. A library plans for each new length, which takes tens
    of milliseconds: worth it for lengths that come again, as those of captured graphs do, not for all lengths."""
    return piece.before == 0 and piece.count in ROUND_LENGTHS


def _apart(x: Tensor, count: int) -> Tensor:
    """[heads, count · T, D] as [count, heads, T, D]."""
    return x.transpose(0, 1).unflatten(0, (count, -1)).transpose(1, 2)
