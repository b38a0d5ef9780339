"""States: bytes per weight of everything that lives as long as the run, by precision, optimizer states and ZeRO stage.

Mixed precision with Adam (Micikevicius et al. 2017; Rajbhandari et al. 2020): 2 weights + 2 gradients + 4 master
weights + 4 + 4 moments = 16 bytes. ZeRO-1 splits masters and moments over data ranks, ZeRO-2 gradients too, ZeRO-3
weights too. `States` are what parallel/data.py makes of it with FSDP2, where the float32 shards are the masters
and 16-bit weights exist while gathered only. With masters on the host, FSDP2's shards and their gradients have 16 bits.

Offload (levers/offload.py): matrices' moments, masters and with `weights` the layers' weights are on the host; they
pass through a ring of staging memory on the GPU to be updated there, and layers' weights through two slots.
`offload_keep_bytes` are filled with what belongs to the vocabulary's matrices, then to the first layers'.
"""

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


class States:
    """What one rank holds of its weights from the first step to the last."""

    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        levers: Levers,
        params: Params,
        in_layers: Params,
        streamed_at_once: int = 0,
    ) -> None:
        """Of a rank that has `params`, some of them `in_layers`, before data ranks split them; layers' weights that are
        on the host come `streamed_at_once` at a time."""
        has_masters, is_offloaded = workload.has_masters, offloads_states(levers)
        shards_are_masters = layout.zero > 0 and has_masters and not is_offloaded
        self.ranks = layout.sharing
        """That share one copy of the weights, where ZeRO splits them."""
        self.owned = params.shard(self.ranks, layout.expert) if layout.zero else params.all
        """Weights that this rank updates: all of its own, or a shard."""
        self.element_bytes = workload.weight_bytes
        """Of a weight, and of its gradient, in forward and backward."""
        self.updated_bytes = FLOAT32_BYTES if has_masters else self.element_bytes
        """Of a weight as the optimizer updates it: float32 where masters are."""
        self.moment_bytes = moment_bytes(levers, wide=workload.updates_wide)
        """Of both its moments."""
        whole_gradient_bytes = max(self.element_bytes, 0 if layout.zero else workload.engine.memory.gradient_bytes)
        self.kept_gradient_bytes = self.updated_bytes if shards_are_masters else whole_gradient_bytes
        """Of a gradient as it is kept: under FSDP2 in the dtype of the shards, float32 where these are the masters."""
        self.reduced_gradient_bytes = self.updated_bytes if layout.zero else self.element_bytes
        """Of a gradient as FSDP2 reduces it, and ZeRO-1 sums it over micro-batches: float32 where masters are."""
        self.streams_weights = offloads_weights(levers)
        """Whether layers' weights are on the host."""
        self.resident = Resident(
            weights=0 if shards_are_masters else self.element_bytes * self.owned,  # 16-bit copies come and go
            masters=FLOAT32_BYTES * self.owned if has_masters else 0,
            moments=round(self.moment_bytes * self.owned),
        )
        self.host = OnHost()
        if is_offloaded:
            kept = kept_weights(workload, layout, levers, self.owned, offloaded_bytes(workload, levers))
            owned_in_layers = round(self.owned * in_layers.all / max(1, params.all))
            ring_bytes = STATE_SLOTS * min(PIECE_ELEMENTS, self.owned) * passing_bytes(workload, levers)
            self._move_to_host(self.owned - kept, owned_in_layers, streamed_at_once, round(ring_bytes))

    def _move_to_host(self, offloaded: int, owned_in_layers: int, streamed_at_once: int, ring_bytes: int) -> None:
        """States of `offloaded` weights, and layers' weights where these are streamed."""
        resident, element_bytes = self.resident, self.element_bytes
        share = offloaded / self.owned if self.owned else 0.0
        streamed = min(offloaded, owned_in_layers) if self.streams_weights and resident.weights else 0
        slots_bytes = WEIGHT_SLOTS * element_bytes * streamed_at_once if streamed else 0
        narrowing_bytes = MASTER_SLOTS * FLOAT32_BYTES * PIECE_ELEMENTS if streamed and resident.masters else 0
        self.resident = Resident(
            weights=resident.weights - element_bytes * streamed + slots_bytes,
            masters=round(resident.masters * (1 - share)),
            moments=round(resident.moments * (1 - share)),
            staging=(ring_bytes if offloaded else 0) + narrowing_bytes,
        )
        self.host = OnHost(
            weights=0 if resident.masters else element_bytes * streamed,
            masters=round(resident.masters * share),
            moments=round(resident.moments * share),
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
