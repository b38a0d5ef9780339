"""How a layer's work is cut into tiles: which layers are, and attention's heads in how many groups."""

from tightfit.models.spec import ModelSpec


def is_tiled(spec: ModelSpec, layer: int, tiles: int) -> bool:
    """Whether layer `layer` works in tiles: where any is, all are but those routed to experts."""
    return tiles > 1 and not spec.is_routed(layer)


def head_groups(kv_heads: int, tiles: int) -> int:
    """In how many groups attention's heads are computed: what divides the key heads, at most `tiles`."""
    return max(count for count in range(1, min(kv_heads, tiles) + 1) if kv_heads % count == 0)
