"""Tiles: seconds that a layer adds when it goes through its sequence in tiles (levers/tiling.py).

Forward copies tiles' results into whole tensors, and joins groups of heads. Backward recomputes both halves except the
last product, copies gradients likewise, and sums the weights' gradients over tiles in float32: the first is cast to
float32, further ones are added, the sum is cast back. Every product is split into as many as there are tiles, each
with a product's fixed time. The host launches each tile's kernels: their time is linear between the measurements at two
and at eight tiles; recomputation besides (checkpointing) was measured at four.
"""

from tightfit.hardware.launches import LAYER, Launch
from tightfit.jobs.levers import Levers
from tightfit.plan.seconds.cost_context import CostContext
from tightfit.plan.seconds.layer import LayerTime
from tightfit.plan.seconds.passes import PassSeconds

CAST_UP, ADDED, CAST_DOWN = 1 + 2, 1 + 2 + 2, 2 + 1
"""Numbers read and written per weight by each step of the float32 sum: 1 for bf16, 2 for float32."""
PRODUCTS = 7
"""Matrix products of a layer; backward has two for each, and computes all but one again."""
RECOMPUTED_TILES = LAYER["tiles=4 checkpoint_every=1"].beyond(LAYER["tiles=4"])
"""Launches that recomputation adds to a tiled layer, at any level."""


def tile_seconds(seconds: float, levers: Levers) -> list[float]:
    """Seconds of each product that one of `seconds` is split into."""
    return [seconds / levers.tiles] * levers.tiles


def tiled_launches(levers: Levers) -> tuple[int, Launch]:
    """Pieces of a layer, and the host's milliseconds of launching all of them; an untiled layer is one piece."""
    if levers.tiles == 1:
        return 1, LAYER[""]
    few, many = LAYER["tiles=2"], LAYER["tiles=8"]
    return levers.tiles, Launch(*(a + (b - a) * (levers.tiles - 2) / 6 for a, b in zip(few, many, strict=True)))


def second_half_is_computed_again(levers: Levers) -> bool:
    """Whether backward recomputes everything after attention, checkpointed or not."""
    return levers.tiles > 1


def tiled_more_s(ctx: CostContext, layer: LayerTime, levers: Levers) -> PassSeconds:
    """Seconds that tiles add to one layer's forward and backward."""
    tiles = levers.tiles
    if tiles == 1:
        return PassSeconds()
    spec, products, elementwise = ctx.workload.spec, layer.products, layer.elementwise
    pieces_s = (tiles - 1) * PRODUCTS * ctx.rates.product_fixed_s
    copied_width = spec.hidden_size + 2 * (spec.query_size + spec.kv_size) / layer.tensor
    copies_s = 2 * layer.tokens * copied_width * ctx.workload.weight_bytes / ctx.rates.bytes_s
    sums_s = products.weights_once_s * (CAST_UP + ADDED * (tiles - 1) + CAST_DOWN)
    again_s = products.qkv_s + products.output_s + products.up_s + elementwise.norms_s + elementwise.heads_s
    return PassSeconds(pieces_s + copies_s, again_s + 3 * pieces_s + sums_s + 2 * copies_s)
