"""States: bytes per weight of everything that lives as long as the run, by precision, optimizer states and ZeRO stage.

Mixed precision with Adam (Micikevicius et al. 2017; Rajbhandari et al. 2020): 2 weights + 2 gradients + 4 master
weights + 4 + 4 moments = 16 bytes. ZeRO-1 splits masters and moments over data ranks, ZeRO-2 gradients too, ZeRO-3
weights too. `resident_states` is what parallel/data.py makes of it with FSDP2, where the float32 shards are the masters
and 16-bit weights exist while gathered only. With masters on the host, FSDP2's shards and their gradients have 16 bits.

Offload (levers/offload.py): matrices' moments, masters and with `weights` the layers' weights are on the host; they
pass through a ring of staging memory on the GPU to be updated there, and layers' weights through two slots.
`offload_keep_bytes` are filled with what belongs to the vocabulary's matrices, then to the first layers'.
"""

from typing import NamedTuple

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.precision import FLOAT32_BYTES
from tightfit.jobs.state_format import moment_bytes
from tightfit.jobs.workload import Workload
from tightfit.levers.policy.offload import (
    MASTER_SLOTS,
    PIECE_ELEMENTS,
    STATE_SLOTS,
    WEIGHT_SLOTS,
    offloads_states,
    offloads_weights,
    whole_that_fit,
)
from tightfit.memory.formulas.local_shape import ceil
from tightfit.memory.formulas.params import Params
from tightfit.memory.formulas.story import OnHost, Resident


class States(NamedTuple):
    """What one rank holds of its weights from the first step to the last."""

    owned: int
    """Weights that this rank updates: all of its own, or a shard."""
    ranks: int
    """That share one copy of them, where ZeRO splits them."""
    element_bytes: int
    """Of a weight, and of its gradient, in forward and backward."""
    updated_bytes: int
    """Of a weight as the optimizer updates it: float32 where masters are."""
    moment_bytes: float
    """Of both its moments."""
    kept_gradient_bytes: int
    """Of a gradient as it is kept: under FSDP2 in the dtype of the shards, float32 where these are the masters."""
    reduced_gradient_bytes: int
    """Of a gradient as FSDP2 reduces it, and ZeRO-1 sums it over micro-batches: float32 where masters are."""
    resident: Resident
    host: OnHost = OnHost()
    streams_weights: bool = False
    """Whether layers' weights are on the host."""


def resident_states(
    workload: Workload, layout: Layout, levers: Levers, params: Params, in_layers: Params, streamed_at_once: int = 0
) -> States:
    """Of a rank that has `params`, some of them `in_layers`, before data ranks split them; layers' weights that are on
    the host come `streamed_at_once` at a time."""
    element_bytes, has_masters = workload.weight_bytes, workload.has_masters
    updated_bytes, ranks = FLOAT32_BYTES if has_masters else element_bytes, layout.sharing
    owned = params.shard(ranks, layout.expert) if layout.zero else params.all
    moments_bytes, is_offloaded = moment_bytes(levers, wide=workload.updates_wide), offloads_states(levers)
    shards_are_masters = layout.zero > 0 and has_masters and not is_offloaded
    whole_gradient_bytes = max(element_bytes, 0 if layout.zero else workload.engine.memory.gradient_bytes)
    states = States(
        owned=owned,
        ranks=ranks,
        element_bytes=element_bytes,
        updated_bytes=updated_bytes,
        moment_bytes=moments_bytes,
        kept_gradient_bytes=updated_bytes if shards_are_masters else whole_gradient_bytes,
        reduced_gradient_bytes=updated_bytes if layout.zero else element_bytes,
        resident=Resident(
            weights=0 if shards_are_masters else element_bytes * owned,  # 16-bit copies exist while they are gathered
            masters=FLOAT32_BYTES * owned if has_masters else 0,
            moments=round(moments_bytes * owned),
        ),
    )
    if not is_offloaded:
        return states
    owned_in_layers = round(owned * in_layers.all / max(1, params.all))
    return _offloaded(states, workload, layout, levers, owned_in_layers, streamed_at_once)


def _offloaded(
    states: States, workload: Workload, layout: Layout, levers: Levers, owned_in_layers: int, streamed_at_once: int
) -> States:
    """`states` with what is offloaded moved from the GPU to the host."""
    resident, owned, element_bytes = states.resident, states.owned, states.element_bytes
    streams_weights = offloads_weights(levers)
    offloaded = owned - kept_weights(workload, layout, levers, owned, offloaded_bytes(workload, levers))
    offloaded_share = offloaded / owned if owned else 0.0
    streamed = min(offloaded, owned_in_layers) if streams_weights and resident.weights else 0
    slots_bytes = WEIGHT_SLOTS * element_bytes * streamed_at_once if streamed else 0
    piece = min(PIECE_ELEMENTS, owned)
    ring_bytes = round(STATE_SLOTS * piece * passing_bytes(workload, levers)) if offloaded else 0
    narrowing_bytes = MASTER_SLOTS * FLOAT32_BYTES * PIECE_ELEMENTS if streamed and workload.has_masters else 0
    return states._replace(
        resident=Resident(
            weights=resident.weights - element_bytes * streamed + slots_bytes,
            masters=round(resident.masters * (1 - offloaded_share)),
            moments=round(resident.moments * (1 - offloaded_share)),
            staging=ring_bytes + narrowing_bytes,
        ),
        host=OnHost(
            weights=0 if workload.has_masters else element_bytes * streamed,
            masters=round(resident.masters * offloaded_share),
            moments=round(resident.moments * offloaded_share),
        ),
        streams_weights=streams_weights,
    )


def passing_bytes(workload: Workload, levers: Levers) -> float:
    """Of one weight whose states are on the host, what passes to be updated: its moments, and its master or, where
    weights are offloaded too and have none, itself."""
    moments_bytes = moment_bytes(levers, wide=workload.updates_wide)
    if workload.has_masters:
        return moments_bytes + FLOAT32_BYTES
    return moments_bytes + (workload.weight_bytes if offloads_weights(levers) else 0)


def offloaded_bytes(workload: Workload, levers: Levers) -> float:
    """Of one weight, what the GPU is relieved of: what passes, and the weight that is made of a master again."""
    is_made_again = workload.has_masters and offloads_weights(levers)
    return passing_bytes(workload, levers) + (workload.weight_bytes if is_made_again else 0)


def kept_weights(workload: Workload, layout: Layout, levers: Levers, count: int, each_bytes: float) -> int:
    """Of `count` weights, those that `offload_keep_bytes` keep on the GPU, at `each_bytes`: whole vocabulary matrices
    (or shards), then layers."""
    spec = workload.spec
    matrix = ceil(spec.vocab_size, layout.weight_ranks) * spec.hidden_size // (layout.sharing if layout.zero else 1)
    matrices = 1 if spec.tied and layout.pipeline == 1 else 2
    room = int(levers.offload_keep_bytes / each_bytes)
    whole = whole_that_fit([matrix] * matrices, room)
    return min(count, whole * matrix if whole < matrices else room)
