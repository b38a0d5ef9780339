"""Sequence tiling: everything in a layer except attention runs on tiles of the sequence; exact.

    q, k, v = rope(project(norm(x)))        in tiles; q, k and v are whole
    a = attention(q, k, v)                  over the whole sequence, one group of heads after another
    y = s + mlp(norm(s)), s = x + o(a)      in tiles

Each tiled half saves its inputs only (tiled_function.py). Beside attention's q, k, v, output and logsumexp a layer
saves x and nothing else, and no intermediate of the MLP's width is larger than a tile. The cost without activation
checkpointing is one more forward of both halves. With it there is none (recomputation of a layer ends at attention, as
the tiles of the second half are recomputed anyway), so long sequences use both.

Heads: the backward of fused attention holds dQ in float32 and dK and dV per query head, four times q in bf16, more than
all else of a layer. So heads run in groups (at most one per key/value head, and no more than there are tiles), which
divides that workspace by the number of groups.

Tensor ranks communicate at the same places as without tiles, once a tile: input and output of attention pass through
the layer's `Exchange`, which parallel/tensor.py sets on the attention module. Under sequence parallelism a rank tiles
its own n tokens. All-gathered, tile j has tile j of every rank, [ranks, n / tiles, …]: in q, k and v, which are
[ranks, n, …] in the order of the sequence, it is a slice of the second dimension, as everywhere.

Limits: MoE layers are not tiled, as their load-balancing loss is not a sum over tiles. Hooks on modules inside a layer
see tiles; hooks on the attention module are not called. Generation with a key/value cache is not tiled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from tightfit.errors import UserError
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.rules.rule import Run
from tightfit.jobs.rules.tiles import routed_layers_are_not_tiled
from tightfit.kernels.attention.attention import AttentionImpl, AttentionMask, attention
from tightfit.kernels.attention.rope import rope
from tightfit.levers.policy.tiles import head_groups
from tightfit.levers.tiled_function import in_tiles
from tightfit.models.decoder import Decoder, ForwardContext, Layer
from tightfit.models.layers.mlp import Mlp

EXCHANGE = "exchange"
"""Attribute of an attention module with the collectives of tensor ranks around it."""


class Exchange(Protocol):
    """The collectives of tensor ranks around attention."""

    def enter_tile(self, x: Tensor, length: int) -> Tensor:
        """Called on a tile before q, k and v are projected; `length` is that of a row."""

    def leave_tile(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """Called on a tile after the output projection; adds its bias."""


def tile_layers(model: Decoder, levers: Levers) -> None:
    """Make every dense layer run in tiles of the sequence where `levers` ask for more than one."""
    if levers.tiles == 1:
        return
    if sentence := routed_layers_are_not_tiled(Run(layout=Layout(), levers=levers, spec=model.spec)):
        raise UserError(sentence)
    for layer in (each for each in model.layers if isinstance(each.mlp, Mlp)):
        layer.forward = TiledLayer(cast(Layer, layer), levers.tiles, layer.forward)


@dataclass(frozen=True)
class TiledLayer:
    """A layer's forward in tiles; `untiled` is its original forward."""

    layer: Layer
    tiles: int
    untiled: Callable[..., Any]

    def __call__(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor | None]:
        if ctx.cache is not None:
            return self.untiled(x, ctx)
        layer, own = self.layer, self.layer.attention
        first = (layer.attention_norm, own.q, own.k, own.v, own.q_norm, own.k_norm)
        second = (own.o, layer.attention_post_norm, layer.mlp_norm, layer.mlp, layer.mlp_post_norm)
        tokens = x.shape[1]
        heads = in_tiles(lambda tile, x: self._project_qkv(x, tile, tokens, ctx), [x], _present(first), self.tiles)
        if self.exchange is not None:  # from [ranks, their tokens] to rows
            heads = tuple(each.view(-1, ctx.mask.queries, *each.shape[2:]) for each in heads)
        attended = [each.reshape(-1, tokens, *each.shape[2:]) for each in self._attend(heads, ctx)]
        (out,) = in_tiles(
            lambda tile, x, *attended: self._finish(x, attended),
            [x, *attended],
            _present(second),
            self.tiles,
            result_matters=layer.mlp_post_norm is not None,
        )
        return out, None

    @property
    def exchange(self) -> Exchange | None:
        """The collectives of tensor ranks around attention; None on one rank."""
        found: Exchange | None = vars(self.layer.attention).get(EXCHANGE)
        return found

    def _project_qkv(self, x: Tensor, tile: slice, tokens: int, ctx: ForwardContext) -> tuple[Tensor, ...]:
        """Queries, then keys, then values of every group of heads, each [B, t, heads, D]; `tokens` are those of x."""
        own, normed = self.layer.attention, self.layer.attention_norm(x)
        if (exchange := self.exchange) is not None:
            normed = exchange.enter_tile(normed, ctx.mask.queries)
        query, key, value = (m(normed).unflatten(-1, (-1, own.head_dim)) for m in (own.q, own.k, own.v))
        if own.q_norm is not None and own.k_norm is not None:
            query, key = own.q_norm(query), own.k_norm(key)
        if own.rope is not None:
            cos, sin = (_tile_of(table, tile, len(normed) // len(x), tokens) for table in ctx.rope_tables[own.rope])
            rotated = rope(query.transpose(1, 2), key.transpose(1, 2), cos, sin, impl=own.impl.rope)
            query, key = (heads.transpose(1, 2) for heads in rotated)
        groups = head_groups(max(1, key.shape[2] // ctx.heads_multiple), self.tiles)
        return tuple(group for heads in (query, key, value) for group in heads.chunk(groups, dim=2))

    def _attend(self, heads: tuple[Tensor, ...], ctx: ForwardContext) -> list[Tensor]:
        """Attention of each group, [B, T, heads, D]."""
        own, count = self.layer.attention, len(heads) // 3
        groups = [group.transpose(1, 2) for group in heads]
        limits: dict[str, Any] = {"scale": own.scale, "window": own.window, "softcap": own.softcap}
        attend = ctx.attend or partial(_attend_here, ctx.mask, own.impl.attention)
        return [
            attend(own.layer, query, key, value, **limits).transpose(1, 2)
            for query, key, value in zip(groups[:count], groups[count : 2 * count], groups[2 * count :], strict=True)
        ]

    def _finish(self, x: Tensor, attended: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """From attention's output to the new residual stream."""
        layer = self.layer
        added = layer.attention.o(torch.cat(attended, dim=2).flatten(2))
        if (exchange := self.exchange) is not None:
            added = exchange.leave_tile(added, layer.attention.o.bias)
        if layer.attention_post_norm is not None:
            added = layer.attention_post_norm(added)
        normed, x = layer.mlp_norm(added, residual=x)
        out, _ = layer.mlp(normed)
        return (x + (out if layer.mlp_post_norm is None else layer.mlp_post_norm(out)),)


def _tile_of(table: Tensor, tile: slice, ranks: int, tokens: int) -> Tensor:
    """The rows [B or 1, 1, t, d] of a rope table for a tile, or [ranks, 1, t, d] where `ranks` have `tokens` each."""
    if ranks == 1:
        return table[:, :, tile]
    own = torch.arange(tile.start, tile.stop, device=table.device)
    flat = torch.arange(ranks, device=table.device)[:, None] * tokens + own
    row, position = flat // table.shape[2], flat % table.shape[2]
    return table[row if table.shape[0] > 1 else 0, 0, position][:, None]


def _attend_here(
    mask: AttentionMask, impl: AttentionImpl, _: int, query: Tensor, key: Tensor, value: Tensor, **limits: Any
) -> Tensor:
    return attention(query, key, value, mask, **limits, impl=impl)


def _present(modules: tuple[nn.Module | None, ...]) -> list[nn.Module]:
    return [module for module in modules if module is not None]
