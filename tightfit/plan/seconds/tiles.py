"""Tiles: what a layer pays for working through its sequence in pieces (levers/tiling.py).

Forward copies what tiles make into whole tensors, and joins groups of heads. Backward computes both halves again, but
for what the last product would make, does the same copies for gradients, and adds the weights' gradients up in float32:
the first is widened, further ones are added, the sum is narrowed. Every product comes in as many pieces as there are
tiles, each with the fixed time of one.
"""

from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.plan.seconds.layer import LayerTime
from tightfit.plan.seconds.rates import Rates

NARROW, WIDE = 1, 2
"""Of a number, in widths of bf16."""
WIDENED, ADDED, NARROWED = NARROW + WIDE, NARROW + 2 * WIDE, WIDE + NARROW
PRODUCTS = 7
"""Of a layer; backward has two for each, and all but one again."""


def tiled_more_s(
    workload: Workload, rates: Rates, layer: LayerTime, levers: Levers, *, tensor: int
) -> tuple[float, float]:
    """Seconds on top of one layer's forward and backward."""
    tiles = levers.tiles
    if tiles == 1:
        return 0.0, 0.0
    spec, products, elementwise = workload.spec, layer.products, layer.elementwise
    pieces_s = (tiles - 1) * PRODUCTS * rates.product_fixed_s
    copied_width = spec.hidden_size + 2 * (spec.query_size + spec.kv_size) / tensor
    copies_s = 2 * layer.tokens * copied_width * workload.weight_bytes / rates.bytes_s
    sums_s = products.weights_once_s * (WIDENED + ADDED * (tiles - 1) + NARROWED)
    again_s = products.qkv_s + products.output_s + products.up_s + elementwise.norms_s + elementwise.rope_s
    return pieces_s + copies_s, again_s + 3 * pieces_s + sums_s + 2 * copies_s
