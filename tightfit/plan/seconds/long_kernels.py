"""A layer's long kernels: attention and the matrix products, which occupy every multiprocessor until they end.

An offloaded state's update or a master's cast that becomes ready meanwhile cannot start before the kernel ends, and the
host link stalls once the staging buffers are full (levers/state_link.py, weight_streaming.py). If the buffers hold
`ahead_s` seconds of copies:

    stall = Σ over kernels of max(0, seconds of the kernel − ahead_s)
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
"""Time of a product of 8-bit codes relative to 16 bits."""


@dataclass(frozen=True, kw_only=True)
class LongKernels:
    """Seconds of each long kernel that one layer launches, and the number of layers."""

    layers: int
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    recomputed_s: Sequence[tuple[float, Sequence[float]]] = ()
    """(share of layers, kernels that these layers recompute in backward)."""

    def stalls(self, *, forward_ahead_s: float, backward_ahead_s: float) -> PassSeconds:
        """Seconds of each pass in which the link stalls, with buffers for `…_ahead_s` seconds of copies."""
        recomputed_s = sum(share * _stall_s(kernels, backward_ahead_s) for share, kernels in self.recomputed_s)
        return PassSeconds(
            forward_s=self.layers * _stall_s(self.forward_s, forward_ahead_s),
            backward_s=self.layers * (_stall_s(self.backward_s, backward_ahead_s) + recomputed_s),
        )


def long_kernels(spec: ModelSpec, layer: LayerTime, levers: Levers, recomputed: Recompute, layers: int) -> LongKernels:
    """The long kernels of `layers` layers, with recomputation; tiles split products into shorter ones."""
    products, ups = layer.products, spec.up_projections
    duration = FP8_SHARE if levers.matmul != "native" else 1.0
    qkv_s = tile_seconds(duration * products.qkv_s, levers)
    output_s = tile_seconds(duration * products.output_s, levers)
    up_s = ups * tile_seconds(duration * products.up_s / ups, levers)
    down_s = tile_seconds(duration * products.down_s, levers)
    all_products_s = [*qkv_s, *output_s, *up_s, *down_s]
    all_but_last_s = [*qkv_s, *output_s, *up_s]
    recomputed_s = {
        "nothing": [layer.attention.forward_s, *all_but_last_s],
        "attention": all_but_last_s,
        "matmuls": [],
    }
    return LongKernels(
        layers=layers,
        forward_s=[layer.attention.forward_s, *all_products_s],
        backward_s=[layer.attention.backward_s, *all_products_s, *all_products_s],
        recomputed_s=[(share, recomputed_s[level]) for level, share in recomputed.shares],
    )


def _stall_s(kernels_s: Sequence[float], ahead_s: float) -> float:
    return sum(max(0.0, seconds - ahead_s) for seconds in kernels_s)
