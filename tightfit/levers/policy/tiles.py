"""Which layers run in tiles, and in how many groups attention's heads run."""

from tightfit.models.spec import ModelSpec


def is_tiled(spec: ModelSpec, layer: int, tiles: int) -> bool:
    """Whether layer `layer` runs in tiles: with more than one tile, all layers but those with experts."""
    return tiles > 1 and not spec.is_routed(layer)


def head_groups(kv_heads: int, tiles: int) -> int:
    """Groups in which attention's heads run: the largest divisor of the key/value heads that is at most `tiles`."""
    return max(count for count in range(1, min(kv_heads, tiles) + 1) if kv_heads % count == 0)
