"""A layer in tiles (levers/tiling.py): what it keeps for backward, and what is alive besides at its fullest moments.

It keeps its input and what attention keeps. In backward its second half comes first, a tile at a time: gate, up and the
gradient of their product for a tile's tokens, beside float32 sums of the weights' gradients and those of the tile at
hand. Then attention, a group of heads after another, then the projections, again by tiles. Moments are otherwise those
of layer.py, and so are the units. Layers routed to experts are not tiled.
"""

from tightfit.memory.formulas.layer import (
    STATISTIC,
    Kept,
    LayerCost,
    Moment,
    attended,
    attention_workspace,
    stream_bytes,
)
from tightfit.memory.formulas.share import Share, ceil
from tightfit.models.spec import ModelSpec


def tiled_kept(spec: ModelSpec, share: Share) -> tuple[Kept, ...]:
    """Everything a tiled layer keeps for backward."""
    return (Kept("residual", "layer input", stream_bytes(spec, share), "both halves keep it"), *attended(spec, share))


def head_groups(kv_heads: int, tiles: int) -> int:
    """In how many groups attention's heads are computed: what divides the key heads, at most `tiles`."""
    return max(count for count in range(1, min(kv_heads, tiles) + 1) if kv_heads % count == 0)


def tile_bytes(spec: ModelSpec, share: Share) -> int:
    """Alive of one tile of the second half, when the gradient of the MLP's product is made: see `token_bytes`."""
    return ceil(share.tokens, share.tiles) * token_bytes(spec, share.element_bytes, share.tensor)


def token_bytes(spec: ModelSpec, element_bytes: int, tensor: int = 1) -> int:
    """Of one token inside a tile: the wide ones, attention's output joined, the sum, its norm and the tile's result."""
    wide = 3 * ceil(spec.mlp_size, tensor)
    stream = (3 + 2 * spec.sandwich_norms) * spec.hidden_size
    return (wide + stream + ceil(spec.heads, tensor) * spec.head_dim) * element_bytes


def tiled_cost(spec: ModelSpec, layer: int, share: Share) -> LayerCost:
    """All of a tiled layer's numbers on one rank."""
    kept = sum(each.bytes for each in tiled_kept(spec, share))
    stream, inside = stream_bytes(spec, share), tile_bytes(spec, share)
    attention = kept - stream
    queries = share.tokens * share.heads(spec) * spec.head_dim * share.element_bytes
    return LayerCost(  # the new residual stream is what the next layer or the final norm keeps
        kept=kept,
        entry=stream,
        forward_extra=inside,
        forward_working=max(attention, queries + inside),
        backward=_moments(spec, layer, share, kept),
        recompute=Moment("recomputed forward", kept, stream, 0, 0, 0),
    )


def _moments(spec: ModelSpec, layer: int, share: Share, kept: int) -> tuple[Moment, ...]:
    n, e, heads = share.tokens, share.element_bytes, share.heads(spec)
    stream, queries = stream_bytes(spec, share), n * heads * spec.head_dim * e
    keys = n * share.kv_heads(spec) * spec.head_dim * e
    groups = head_groups(share.kv_heads(spec), share.tiles)
    width = ceil(spec.mlp_size, share.tensor)
    second = spec.hidden_size * ((3 if spec.gated else 2) * width + heads * spec.head_dim)
    first = spec.hidden_size * (heads + 2 * share.kv_heads(spec)) * spec.head_dim
    arrived = 2 * stream + queries  # of y, x and attention's output
    narrow = ceil(n, share.tiles) * (2 * heads * spec.head_dim + 5 * spec.hidden_size) * e
    return (
        Moment("a tile of the second half", kept, arrived + tile_bytes(spec, share), 0, 0, 0, _wide(second, e)),
        Moment("its weights' gradients", kept, arrived + narrow, 0, second, second, _wide(second, e)),
        Moment("a group of attention's heads", kept, stream + queries + (queries + 2 * keys) // groups,
               attention_workspace(spec, layer, share) // groups, second, second),
        Moment("a tile of the projections", stream, 2 * stream + queries + 2 * keys + narrow, 0, second + first, first,
               _wide(first, e)),
    )  # fmt: skip


def _wide(weights: int, element_bytes: int) -> int:
    """The float32 sums over tiles, counted in weights of `element_bytes`."""
    return weights * STATISTIC // element_bytes
