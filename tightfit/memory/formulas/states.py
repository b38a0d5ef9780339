"""States: bytes per weight of everything that lives as long as the run, by precision, optimizer states and ZeRO stage.

Mixed precision with Adam (Micikevicius et al. 2017; Rajbhandari et al. 2020): 2 weights + 2 gradients + 4 master
weights + 4 + 4 moments = 16 bytes. ZeRO-1 splits masters and moments over data ranks, ZeRO-2 gradients too, ZeRO-3
weights too. `States` counts them as parallel/data.py implements ZeRO with FSDP2: the float32 shards are the masters,
and 16-bit weights exist only while gathered. With masters on the host, FSDP2's shards and their gradients have 16 bits.

Offload (levers/offload.py): moments and masters of matrices, and with `offload: weights` the layers' weights, are on
the host. States pass through a ring of staging buffers on the GPU to be updated there, layers' weights through two
slots. `offload_keep_bytes` keep states on the GPU: first the vocabulary's matrices', then the first layers'.
"""

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.precision import FLOAT32_BYTES
from tightfit.jobs.state_format import moment_bytes
from tightfit.jobs.workload import Workload
from tightfit.levers.policy import offload
from tightfit.memory.formulas.local_shape import ceil
from tightfit.memory.formulas.params import Params
from tightfit.memory.formulas.story import OnHost, Resident


class States:
    """Bytes per weight, and bytes of weights, masters and moments that a rank with `params` holds throughout the run.

    `params` and, of them, `in_layers` are before data ranks split them; layers' weights on the host are copied to the
    GPU `streamed_at_once` at a time.
    """

    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        levers: Levers,
        params: Params,
        in_layers: Params,
        streamed_at_once: int = 0,
    ) -> None:
        has_masters, is_offloaded = workload.has_masters, offload.offloads_states(levers)
        shards_are_masters = layout.zero > 0 and has_masters and not is_offloaded
        self.ranks = layout.zero_ranks
        """Ranks that share one copy of the weights, where ZeRO splits them."""
        self.owned = params.shard(self.ranks, layout.expert) if layout.zero else params.all
        """Weights that this rank updates: all of its own, or a shard."""
        self.element_bytes = workload.weight_bytes
        self.updated_bytes = workload.updated_bytes
        self.moment_bytes = moment_bytes(levers, wide=self.updated_bytes == FLOAT32_BYTES)
        """Bytes of a weight (and of its gradient) in forward and backward, where it is updated, and of both moments."""
        whole_gradient_bytes = max(self.element_bytes, 0 if layout.zero else workload.engine.memory.gradient_bytes)
        self.kept_gradient_bytes = self.updated_bytes if shards_are_masters else whole_gradient_bytes
        """Bytes of a gradient kept for the update: under FSDP2 in the shards' dtype, float32 if they are masters."""
        self.reduced_gradient_bytes = self.updated_bytes if layout.zero else self.element_bytes
        """Bytes of a gradient in FSDP2's reduce-scatter, and in ZeRO-1's sum over micro-batches: 4 with masters."""
        self.streams_weights = offload.offloads_weights(levers)
        self.resident, self.host = (
            Resident(
                weights=0 if shards_are_masters else self.element_bytes * self.owned,  # 16-bit copies come and go
                masters=FLOAT32_BYTES * self.owned if has_masters else 0,
                moments=round(self.moment_bytes * self.owned),
            ),
            OnHost(),
        )
        if is_offloaded:
            kept = kept_weights(workload, layout, levers, self.owned, offloaded_bytes(workload, levers))
            owned_in_layers = round(self.owned * in_layers.all / max(1, params.all))
            ring_elements = offload.STATE_SLOTS * min(offload.PIECE_ELEMENTS, self.owned)
            ring_bytes = round(ring_elements * passing_bytes(workload, levers))
            self._move_to_host(self.owned - kept, owned_in_layers, streamed_at_once, ring_bytes)

    def _move_to_host(self, offloaded: int, owned_in_layers: int, streamed_at_once: int, ring_bytes: int) -> None:
        """Move the states of `offloaded` weights, and layers' weights where these are streamed."""
        resident, element_bytes = self.resident, self.element_bytes
        share = offloaded / self.owned if self.owned else 0.0
        streamed = min(offloaded, owned_in_layers) if self.streams_weights and resident.weights else 0
        slots_bytes = offload.WEIGHT_SLOTS * element_bytes * streamed_at_once if streamed else 0
        casts_masters = streamed and resident.masters
        cast_bytes = offload.MASTER_SLOTS * FLOAT32_BYTES * offload.PIECE_ELEMENTS if casts_masters else 0
        self.resident = Resident(
            weights=resident.weights - element_bytes * streamed + slots_bytes,
            masters=round(resident.masters * (1 - share)),
            moments=round(resident.moments * (1 - share)),
            staging=(ring_bytes if offloaded else 0) + cast_bytes,
        )
        self.host = OnHost(
            weights=0 if resident.masters else element_bytes * streamed,
            masters=round(resident.masters * share),
            moments=round(resident.moments * share),
        )


def passing_bytes(workload: Workload, levers: Levers) -> float:
    """Bytes per weight that are copied to the GPU and back for an update of states on the host: moments, and the master
    or, where weights are offloaded and have no masters, the weight itself."""
    moments_bytes = moment_bytes(levers, wide=workload.updates_wide)
    if workload.has_masters:
        return moments_bytes + FLOAT32_BYTES
    return moments_bytes + (workload.weight_bytes if offload.offloads_weights(levers) else 0)


def offloaded_bytes(workload: Workload, levers: Levers) -> float:
    """Bytes per weight that offloading frees on the GPU: `passing_bytes`, and a weight that is cast from its master
    whenever it is streamed in."""
    is_cast = workload.has_masters and offload.offloads_weights(levers)
    return passing_bytes(workload, levers) + (workload.weight_bytes if is_cast else 0)


def kept_weights(workload: Workload, layout: Layout, levers: Levers, count: int, each_bytes: float) -> int:
    """How many of `count` weights `offload_keep_bytes` keep on the GPU, at `each_bytes` per weight: whole vocabulary
    matrices (or their shards) first, then layers."""
    spec = workload.spec
    matrix = ceil(spec.vocab_size, layout.weight_ranks) * spec.hidden_size // (layout.zero_ranks if layout.zero else 1)
    matrices = 1 if spec.tied and layout.pipeline == 1 else 2
    room = int(levers.offload_keep_bytes / each_bytes)
    whole = offload.count_that_fit([matrix] * matrices, room)
    return min(count, whole * matrix if whole < matrices else room)
