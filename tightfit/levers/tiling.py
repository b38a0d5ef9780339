"""Sequence tiling: all of a layer but attention, in pieces of the sequence; exact.

    q, k, v = rope(project(norm(x)))        in tiles; q, k and v are whole
    mixed = attention(q, k, v)              over the whole sequence, a group of heads after another
    y = s + mlp(norm(s)), s = x + o(mixed)  in tiles

Each tiled half keeps its inputs alone (tiled_function.py). Beside attention's own q, k, v, output and a float32 per row
and head, a layer then keeps x and nothing else, and no intermediate of the MLP's width exists for more than a tile. The
price without activation checkpointing is one more forward of both halves; with it there is none (a recomputed layer
ends at attention, as the second half is computed again by its tiles anyway), so long sequences use both.

Heads: a fused attention's backward holds dQ in float32 and dK and dV per query head, four times q in bf16, more than
all else of a layer. Attention heads do not depend on each other, so they go through it in groups, one for each key head
at most and no more than there are tiles, and its workspace is divided by their number.

Limits: layers routed to experts are left whole, as their load-balancing loss is no sum over tiles. Hooks on modules
inside a layer see tiles, and the attention module's own see nothing. Generating with a cache is not tiled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from tightfit.errors import UserError
from tightfit.kernels.attention import attention
from tightfit.kernels.rope import rope
from tightfit.levers.tiled_function import in_tiles
from tightfit.models.decoder import Decoder, ForwardContext, Layer
from tightfit.models.mlp import Mlp


def tile_layers(model: Decoder, tiles: int) -> None:
    """Make every dense layer work in `tiles` pieces of the sequence; 1 changes nothing."""
    if tiles == 1:
        return
    dense = [layer for layer in model.layers if isinstance(layer.mlp, Mlp)]
    if not dense:
        raise UserError(
            f"levers.tiles is {tiles}, but all MLPs of {model.spec.family} are routed to experts, which are not tiled; "
            "set it to 1"
        )
    for layer in dense:
        layer.forward = TiledLayer(cast(Layer, layer), tiles, layer.forward)


def head_groups(kv_heads: int, tiles: int) -> int:
    """In how many groups attention's heads are computed: what divides the key heads, at most `tiles`."""
    return max(count for count in range(1, min(kv_heads, tiles) + 1) if kv_heads % count == 0)


@dataclass(frozen=True)
class TiledLayer:
    """A layer's forward in tiles; `whole` is the one it had."""

    layer: Layer
    tiles: int
    whole: Callable[..., Any]

    def __call__(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor | None]:
        if ctx.cache is not None:
            return self.whole(x, ctx)
        layer, own = self.layer, self.layer.attention
        first = (layer.attention_norm, own.q, own.k, own.v, own.q_norm, own.k_norm)
        second = (own.o, layer.attention_post_norm, layer.mlp_norm, layer.mlp, layer.mlp_post_norm)
        mixed = self._attended(
            in_tiles(lambda part, x: self._projected(x, part, ctx), [x], _there(first), self.tiles), ctx
        )
        (made,) = in_tiles(
            lambda part, x, *mixed: self._finished(x, mixed), [x, *mixed], _there(second), self.tiles,
            result_matters=layer.mlp_post_norm is not None,
        )  # fmt: skip
        return made, None

    def _projected(self, x: Tensor, part: slice, ctx: ForwardContext) -> tuple[Tensor, ...]:
        """Queries, then keys, then values of every group of heads, each [B, t, heads, D]."""
        own, normed = self.layer.attention, self.layer.attention_norm(x)
        query, key, value = (m(normed).unflatten(-1, (-1, own.head_dim)) for m in (own.q, own.k, own.v))
        if own.q_norm is not None and own.k_norm is not None:
            query, key = own.q_norm(query), own.k_norm(key)
        if own.rope is not None:
            cos, sin = (table[:, :, part] for table in ctx.rope_tables[own.rope])
            turned = rope(query.transpose(1, 2), key.transpose(1, 2), cos, sin, impl=own.impl.rope)
            query, key = (heads.transpose(1, 2) for heads in turned)
        groups = head_groups(key.shape[2], self.tiles)
        return tuple(piece for heads in (query, key, value) for piece in heads.chunk(groups, dim=2))

    def _attended(self, heads: tuple[Tensor, ...], ctx: ForwardContext) -> list[Tensor]:
        """Attention of each group, [B, T, heads, D]."""
        own, groups = self.layer.attention, len(heads) // 3
        pieces = [piece.transpose(1, 2) for piece in heads]
        queries, keys, values = (pieces[i * groups : (i + 1) * groups] for i in range(3))
        return [
            attention(
                query, key, value, ctx.mask,
                scale=own.scale, window=own.window, softcap=own.softcap, impl=own.impl.attention,
            ).transpose(1, 2)
            for query, key, value in zip(queries, keys, values, strict=True)
        ]  # fmt: skip

    def _finished(self, x: Tensor, mixed: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """From attention's output to the new residual stream."""
        layer = self.layer
        added = layer.attention.o(torch.cat(mixed, dim=2).flatten(2))
        if layer.attention_post_norm is not None:
            added = layer.attention_post_norm(added)
        normed, x = layer.mlp_norm(added, residual=x)
        made, _ = layer.mlp(normed)
        return (x + (made if layer.mlp_post_norm is None else layer.mlp_post_norm(made)),)


def _there(modules: tuple[nn.Module | None, ...]) -> list[nn.Module]:
    return [module for module in modules if module is not None]
