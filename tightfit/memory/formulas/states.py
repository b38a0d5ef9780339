"""States: bytes per weight of everything that lives as long as the run, by precision, optimizer states and ZeRO stage.

Mixed precision with Adam (Micikevicius et al. 2017; Rajbhandari et al. 2020): 2 weights + 2 gradients + 4 master
weights + 4 + 4 moments = 16 bytes. ZeRO-1 splits masters and moments over data ranks, ZeRO-2 gradients too, ZeRO-3
weights too. `paper_bytes` is that rule; `States` is what parallel/data.py makes of it with FSDP2, where the float32
shards are the masters, 16-bit weights exist while gathered only, and sharded gradients are float32 like the masters.

Offload (not built yet, assumed): masters, moments and gradients on the host, where the optimizer works, and with
`weights` the weights as well, of which two layers and the output projection are on the GPU at a time. A layer's
gradients leave as soon as they are complete. With `levers.update_in_backward` gradients are gone once complete.
"""

from typing import NamedTuple

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.state_format import moment_bytes
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.params import Params

MASTER = 4


class PerWeight(NamedTuple):
    """Bytes of each state per weight, unsharded."""

    weights: int
    gradients: int
    masters: int
    moments: float

    @property
    def total(self) -> float:
        """All four."""
        return self.weights + self.gradients + self.masters + self.moments


def bytes_per_weight(workload: Workload, levers: Levers) -> PerWeight:
    """What one weight costs on one GPU: 16 bytes for bf16, fp16 and fp32 with float32 moments, 8 for pure bf16."""
    e = workload.weight_bytes
    masters = MASTER if workload.has_masters else 0
    gradients = 0 if levers.update_in_backward else e
    return PerWeight(e, gradients, masters, moment_bytes(levers, wide=workload.updates_wide))


def paper_bytes(per_weight: PerWeight, params: int, zero: int, ranks: int) -> float:
    """ZeRO's own formula: states / N, then gradients / N, then weights / N."""
    states = (per_weight.masters + per_weight.moments) / (ranks if zero >= 1 else 1)
    gradients = per_weight.gradients / (ranks if zero >= 2 else 1)
    weights = per_weight.weights / (ranks if zero >= 3 else 1)
    return params * (states + gradients + weights)


class States(NamedTuple):
    """What one rank holds from the first step to the last, in bytes, and how its gradients come and go."""

    weights: int
    masters: int
    moments: int
    host: bool
    """Masters and moments are on the host, and gradients go there."""
    weights_on_host: int
    gradients: int
    """There from one micro-batch to the next: DDP's buckets, or accumulated sums."""
    growing: float
    """Bytes that a weight adds once its gradient is complete, where they are not there already."""
    reduced: int
    """Bytes per weight in which FSDP2 reduces gradients; 0 without it."""


def states(workload: Workload, layout: Layout, levers: Levers, params: Params, accumulation: int) -> States:
    """Of a rank that holds `params` before data ranks split them."""
    e, ranks = workload.weight_bytes, layout.data * layout.context
    host = levers.offload != "none"
    if layout.zero == 0:
        count, weights, reduced = params.all, e * params.all, 0
        masters = MASTER * count if workload.has_masters else 0
        shared = e
    else:
        count = params.shard(ranks, layout.expert)
        reduced = MASTER if workload.has_masters else e
        masters = MASTER * count if workload.has_masters else 0
        weights, shared = 0 if workload.has_masters else e * count, reduced
    kept = _kept_gradients(layout, params, count, shared, accumulation) if not host else 0
    streamed = levers.offload == "weights" or (host and layout.zero > 0)
    return States(
        weights=0 if streamed else weights,
        masters=masters,
        moments=round(moment_bytes(levers, wide=workload.updates_wide) * count),
        host=host,
        weights_on_host=weights if streamed else 0,
        gradients=kept,
        growing=0 if host or kept or levers.update_in_backward else shared * count / max(1, params.all),
        reduced=reduced,
    )


def _kept_gradients(layout: Layout, params: Params, count: int, each: int, accumulation: int) -> int:
    """DDP's buckets stay; sums stay while there are more micro-batches, unsharded under ZeRO-1 (parallel/data.py).

    Under DDP those sums are beside the buckets: the optimizer has dropped the views, and without synchronisation
    autograd makes tensors of its own, which the last micro-batch copies into the buckets.
    """
    if layout.zero == 0 and layout.data * layout.context > 1:
        return each * params.all * (1 if accumulation == 1 else 2)
    if accumulation == 1:
        return 0
    return each * (params.all if layout.zero == 1 else count)
