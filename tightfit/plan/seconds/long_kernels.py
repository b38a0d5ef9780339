"""A layer's long kernels: attention and the matrix products, which take every multiprocessor until they end.

An update of states or a cast of masters that becomes ready meanwhile waits for that end, and the link stands still once
the buffers before it are full (levers/state_link.py, weight_streaming.py). With buffers that take `ahead_s` seconds of
copies:

    still = Σ over kernels of max(0, seconds of the kernel − ahead)
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tightfit.jobs.levers import Levers
from tightfit.models.spec import ModelSpec
from tightfit.plan.seconds.layer import LayerTime
from tightfit.plan.seconds.passes import PassSeconds
from tightfit.plan.seconds.recompute import Recompute
from tightfit.plan.seconds.tiles import tile_seconds

FP8_SHARE = 0.5
"""Of its time in 16 bits, that a product of 8-bit codes takes."""


@dataclass(frozen=True, kw_only=True)
class LongKernels:
    """Seconds of each that one layer launches, and how many layers there are."""

    layers: int
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    again_s: Sequence[tuple[float, Sequence[float]]] = ()
    """Share of the layers that compute these of forward's again in backward."""

    def still(self, *, forward_ahead_s: float, backward_ahead_s: float) -> PassSeconds:
        """Seconds of each pass in which the link stands still, with buffers for so many seconds of copies."""
        again_s = sum(share * _beyond_s(kernels, backward_ahead_s) for share, kernels in self.again_s)
        return PassSeconds(
            forward_s=self.layers * _beyond_s(self.forward_s, forward_ahead_s),
            backward_s=self.layers * (_beyond_s(self.backward_s, backward_ahead_s) + again_s),
        )


def long_kernels(spec: ModelSpec, layer: LayerTime, levers: Levers, again: Recompute, layers: int) -> LongKernels:
    """Those of `layers` layers, of which some are computed again; tiles make shorter products."""
    products, ups = layer.products, 2 if spec.gated else 1
    share = FP8_SHARE if levers.matmul != "native" else 1.0
    up_s = ups * tile_seconds(share * products.up_s / ups, levers)
    qkv_s, output_s, down_s = (
        tile_seconds(share * seconds, levers) for seconds in (products.qkv_s, products.output_s, products.down_s)
    )
    all_products_s = [*qkv_s, *output_s, *up_s, *down_s]
    again_s = {
        "nothing": [layer.attention.forward_s, *qkv_s, *output_s, *up_s],
        "attention": [*qkv_s, *output_s, *up_s],
        "matmuls": [],
    }
    return LongKernels(
        layers=layers,
        forward_s=[layer.attention.forward_s, *all_products_s],
        backward_s=[layer.attention.backward_s, *all_products_s, *all_products_s],
        again_s=[(share, again_s[level]) for level, share in again.shares],
    )


def _beyond_s(kernels_s: Sequence[float], ahead_s: float) -> float:
    return sum(max(0.0, seconds - ahead_s) for seconds in kernels_s)
