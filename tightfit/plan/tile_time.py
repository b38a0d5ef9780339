"""Tiles' time: what a layer pays for working through its sequence in pieces (levers/tiling.py, tiled_function.py).

Forward copies what tiles make into whole tensors, and joins groups of heads. Backward computes both halves again, but
for what the last product would make, does the same copies for gradients, and adds the weights' gradients up in float32:
the first is widened, further ones are added, the sum is narrowed. Every product comes in as many pieces as there are
tiles, each with the fixed time of one.
"""

from tightfit.plan.layer_time import LayerTime

NARROW, WIDE = 1, 2
"""Of a number, in widths of bf16."""
WIDENED, ADDED, NARROWED = NARROW + WIDE, NARROW + 2 * WIDE, WIDE + NARROW


PRODUCTS = 7
"""Of a layer; backward has two for each, and all but one again."""


def tiled_s(time: LayerTime, tiles: int, product_s: float) -> tuple[float, float]:
    """Seconds on top of one layer's forward and backward."""
    if tiles == 1:
        return 0.0, 0.0
    pieces_s = (tiles - 1) * PRODUCTS * product_s
    sums = time.weights_once_s * (WIDENED + ADDED * (tiles - 1) + NARROWED)
    again = time.projections_s + time.output_s + time.inner_s + time.norms_s + time.rope_s
    return pieces_s + time.tile_copies_s, again + 3 * pieces_s + sums + 2 * time.tile_copies_s
