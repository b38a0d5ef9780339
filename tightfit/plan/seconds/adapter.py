"""Adapters: products of a frozen layer, and the seconds that its adapters add (levers/adapter.py).

Forward has every product of the frozen matrices, backward one for each instead of two: the gradient of the input, none
of the weight. An adapter's own products are so narrow that they are memory-bound, at a third of the card's bandwidth:
forward reads x and adds to y; backward reads dy twice and x, and adds to dx. A coded matrix is dequantized before
either product: codes are read and the matrix is written, at a seventh of the card's bandwidth; without a fused kernel,
through float32 copies.
"""

from dataclasses import replace

from tightfit.hardware.launches import EXPANDED, FROZEN, NOTHING, Launch
from tightfit.jobs.adapter import Adapted
from tightfit.jobs.projections import Projection, linear_shapes
from tightfit.jobs.workload import Workload
from tightfit.plan.seconds.cost_context import CostContext
from tightfit.plan.seconds.parameters import RankParams
from tightfit.plan.seconds.products import Products

NARROW = 3
"""Seconds of products with 16 rows, as a multiple of reading and writing their tokens (adapter_step.csv)."""
EXPANDING = 7
"""Seconds of a dequantizing kernel, as a multiple of reading the codes and writing the matrix (adapter_step.csv)."""
COPIES = 3
"""Tensors written and read when codes are dequantized without a fused kernel."""


def frozen_products(ctx: CostContext, products: Products, tokens: float) -> tuple[Products, float]:
    """Forward `products` of a layer with adapters and dequantization, and the seconds of products in backward."""
    workload, shapes = ctx.workload, linear_shapes(ctx.workload.spec)
    adapted = workload.adapted
    assert adapted is not None

    def beyond_s(name: Projection, moved_numbers: float) -> float:
        """Seconds besides the product with the frozen matrix: dequantizing it, and what an adapter moves."""
        moved_s = NARROW * moved_numbers * workload.weight_bytes / ctx.rates.bytes_s
        return _expansion_s(ctx, adapted, shapes[name]) + (moved_s if name in adapted.projections else 0.0)

    more = {name: beyond_s(name, tokens * (inputs + 2 * outputs)) for name, (outputs, inputs) in shapes.items()}
    weights = sum(outputs * inputs for outputs, inputs in shapes.values())
    forward = replace(
        products,
        qkv_s=products.qkv_s + more["q"] + more["k"] + more["v"],
        output_s=products.output_s + more["o"],
        up_s=products.up_s + more.get("gate", 0.0) + more["up"],
        down_s=products.down_s + more["down"],
        weights_once_s=products.weights_once_s * sum(adapted.matrices(workload.spec)) / weights,
    )
    backward_s = sum(beyond_s(name, tokens * (2 * outputs + 3 * inputs)) for name, (outputs, inputs) in shapes.items())
    return forward, products.forward_s + backward_s


def _expansion_s(ctx: CostContext, adapted: Adapted, shape: tuple[int, int]) -> float:
    """Seconds to dequantize a matrix; 0 where it is not coded."""
    scheme, (outputs, inputs) = adapted.base.scheme, shape
    if scheme is None:
        return 0.0
    is_read = scheme.is_read_packed(inputs) or scheme.is_read_with_outliers(outputs, inputs)
    passes, slower = (1, EXPANDING) if is_read else (COPIES * 2, 1)
    return slower * outputs * inputs * (scheme.bits / 8 + passes * ctx.workload.weight_bytes) / ctx.rates.bytes_s


def adapter_launch(workload: Workload) -> Launch:
    """Launches of a layer with adapters beyond those of a trained layer."""
    adapted = workload.adapted
    if adapted is None:
        return NOTHING
    own = len(adapted.matrices(workload.spec)) // 2
    coded = len(linear_shapes(workload.spec)) if adapted.base.scheme is not None else 0
    return Launch(*(own * each + coded * more for each, more in zip(FROZEN, EXPANDED, strict=True)))


def adapter_params(workload: Workload) -> RankParams:
    """The parameters that a rank updates and reduces over data ranks: the adapters'."""
    assert workload.adapted is not None
    own = float(workload.adapted.params(workload.spec))
    return RankParams(dense=own, owned=own)
