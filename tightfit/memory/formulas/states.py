"""States: bytes per weight of everything that lives as long as the run, by precision, optimizer states and ZeRO stage.

Mixed precision with Adam (Micikevicius et al. 2017; Rajbhandari et al. 2020): 2 weights + 2 gradients + 4 master
weights + 4 + 4 moments = 16 bytes. ZeRO-1 splits masters and moments over data ranks, ZeRO-2 gradients too, ZeRO-3
weights too. `paper_bytes` is that rule; `States` is what parallel/data.py makes of it with FSDP2, where the float32
shards are the masters, 16-bit weights exist while gathered only, and sharded gradients are float32 like the masters.

Offload (levers/offload.py): matrices' moments, masters and with `weights` the layers' weights are on the host; they
pass through a ring of staging memory on the GPU to be updated there (levers/state_link.py), and layers' weights through
two slots (levers/weight_streaming.py). Gradients stay on the GPU until their update is waited for. With updates inside
backward those that wait for the link are bounded. `offload_keep_bytes` are filled with the vocabulary's, then the first
layers' belongings.
"""

from typing import NamedTuple

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.state_format import moment_bytes
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.params import Params, vocabulary_params

MASTER = 4
PIECE_ELEMENTS, STATE_SLOTS, WEIGHT_SLOTS, IN_FLIGHT_BYTES = 4 * 2**20, 6, 2, 512 * 2**20
"""Of levers/state_link.py and levers/weight_streaming.py, which this file must not import; a test compares them."""


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
    host_weights: int
    host_masters: int
    host_moments: int
    staging: int
    """GPU memory that what is on the host passes through."""
    gradients: int
    """There from one micro-batch to the next: DDP's buckets, or accumulated sums."""
    growing: float
    """Bytes that a weight adds once its gradient is complete, where they are not there already."""
    waiting: int | None
    """At most so many bytes of these wait for the link to the host; None where all stay until the step's end."""
    reduced: int
    """Bytes per weight in which FSDP2 reduces gradients; 0 without it."""

    @property
    def host(self) -> bool:
        """Whether anything is on the host."""
        return self.staging > 0


def states(
    workload: Workload, layout: Layout, levers: Levers, params: Params, accumulation: int, widest: int = 0
) -> States:
    """Of a rank that holds `params` before data ranks split them, `widest` of them in one layer."""
    e, ranks = workload.weight_bytes, layout.data * layout.context // layout.copies
    if layout.zero == 0:
        count, weights, reduced = params.all, e * params.all, 0
        masters = MASTER * count if workload.has_masters else 0
        shared = e
    else:
        count = params.shard(ranks, layout.expert)
        reduced = MASTER if workload.has_masters else e
        masters = MASTER * count if workload.has_masters else 0
        weights, shared = 0 if workload.has_masters else e * count, reduced
    moments = moment_bytes(levers, wide=workload.updates_wide)
    kept = _kept_gradients(layout, params, count, shared, accumulation)
    limited = levers.offload != "none" and levers.update_in_backward
    freed = kept or (levers.update_in_backward and not limited)
    plain = States(
        weights, masters, round(moments * count), 0, 0, 0, 0,
        gradients=kept,
        growing=0 if freed else shared * count / max(1, params.all),
        waiting=max(IN_FLIGHT_BYTES, levers.offload_gradient_bytes) if limited else None,
        reduced=reduced,
    )  # fmt: skip
    return plain if levers.offload == "none" else _offloaded(plain, workload, layout, levers, count, widest)


def _offloaded(
    plain: States, workload: Workload, layout: Layout, levers: Levers, count: int, widest: int
) -> States:  # fmt: skip
    """The same with what is away moved to the host."""
    e, streams = workload.weight_bytes, levers.offload == "weights"
    moments = moment_bytes(levers, wide=workload.updates_wide)
    passing = moments + (MASTER if workload.has_masters else 0)
    ends, kept = kept_weights(workload, layout, levers, count, passing + (e if streams else 0))
    away = count - kept
    away_layers = max(0, min(away, count - ends)) if streams and plain.weights else 0
    on_link = passing + (e if streams and not workload.has_masters else 0)
    slots = WEIGHT_SLOTS * e * widest if away_layers else 0
    narrowing = MASTER * PIECE_ELEMENTS if away_layers and workload.has_masters else 0
    share = away / count if count else 0.0
    return plain._replace(
        weights=plain.weights - e * away_layers + slots,
        masters=round(plain.masters * (1 - share)),
        moments=round(plain.moments * (1 - share)),
        host_weights=0 if workload.has_masters else e * away_layers,
        host_masters=round(plain.masters * share),
        host_moments=round(plain.moments * share),
        staging=round(STATE_SLOTS * min(PIECE_ELEMENTS, count) * on_link) + narrowing if away else 0,
    )


def kept_weights(
    workload: Workload, layout: Layout, levers: Levers, count: int, each_bytes: float
) -> tuple[int, int]:  # fmt: skip
    """Weights outside layers, and those whose belongings stay: whole vocabulary matrices, then layers."""
    spec = workload.spec
    matrix = vocabulary_params(spec, layout.tensor)
    matrices = 1 if spec.tied and layout.pipeline == 1 else 2
    room, kept = int(levers.offload_keep_bytes / each_bytes), 0
    for _ in range(matrices):
        if matrix > room:
            return matrices * matrix, kept
        room, kept = room - matrix, kept + matrix
    return matrices * matrix, min(count, kept + room)


def _kept_gradients(layout: Layout, params: Params, count: int, each: int, accumulation: int) -> int:
    """DDP's buckets stay; sums stay while there are more micro-batches, unsharded under ZeRO-1 (parallel/data.py).

    Under DDP those sums are beside the buckets: the optimizer has dropped the views, and without synchronisation
    autograd makes tensors of its own, which the last micro-batch copies into the buckets.
    """
    if layout.zero == 0 and layout.data * layout.context > 1 and layout.pipeline == 1:  # parallel/pipeline.py has none
        return each * params.all * (1 if accumulation == 1 else 2)
    if accumulation == 1:
        return 0
    return each * (params.all if layout.zero == 1 else count)
