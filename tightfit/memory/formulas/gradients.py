"""Gradients of weights on one rank: bytes before backward, their growth during it, and what a step leaves behind.

While backward is at layer k (parallel/data.py, train/step.py), these gradients exist:

- one GPU, one micro-batch: of the head and all layers from k on, `element_bytes` per weight.
- accumulation and DDP: of all weights, as sums or buckets; the running operation's exist twice until they are added.
- FSDP2: whole ones of layer k, shards of the layers after it, in the dtype of the sharded weights. Those of the root
  and the embedding stay whole until FSDP2's last callback.
- update in backward: of layer k, and of the output projection where the embedding shares its weight. Gradients of norms
  and biases stay to the end of backward; they are less than a thousandth and not counted.
- offload: as without. With updates inside backward, the bytes of gradients that wait for the link to the host are
  bounded. Deferred updates keep their gradients into the next forward pass (levers/state_link.py).
"""

import math

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.levers.policy.offload import IN_FLIGHT_BYTES, bounds_gradients, count_that_fit, deferred_bytes
from tightfit.memory.formulas.layer_moments import LayerMoment
from tightfit.memory.formulas.stage import LayerVisit, StageMemory
from tightfit.memory.formulas.states import States
from tightfit.memory.formulas.working_weights import WorkingWeights


class Gradients:
    """Bytes of one rank's weight gradients at the moments of a step."""

    def __init__(
        self,
        layout: Layout,
        levers: Levers,
        stage: StageMemory,
        states: States,
        weights: WorkingWeights,
        *,
        summed_micro_batches: int,
        share_with_sums: float = 1.0,
    ) -> None:
        """A rank that sums `summed_micro_batches`; at its peak `share_with_sums` of its layers have such sums."""
        is_limited = bounds_gradients(levers)
        self.element_bytes = states.element_bytes
        """Bytes per element of a gradient as backward computes it."""
        self.earlier_bytes = _earlier_bytes(layout, stage, states, summed_micro_batches)
        """Gradients that stay from one micro-batch to the next: DDP's buckets, or accumulated sums."""
        if share_with_sums < 1:
            missing_share = (1 - share_with_sums) * self.earlier_bytes * stage.layer_weights / stage.weights
            self.earlier_bytes -= round(missing_share)
        one_by_one = weights.fsdp2.adds_one_by_one and weights.sums_whole
        self.add_in_place = self.earlier_bytes > 0 and (layout.zero == 0 or one_by_one)
        """Whether a new gradient is added to an existing whole one at once, not when its layer is complete."""

        shard_bytes = _shard_bytes(layout, stage, states)
        self.bytes_per_done_weight = 0.0
        """Bytes that each weight of a finished layer adds; 0 where its gradient existed before backward."""
        if not self.earlier_bytes and (is_limited or not levers.update_in_backward):
            self.bytes_per_done_weight = states.reduced_gradient_bytes if weights.sums_whole else shard_bytes
            if layout.zero and layout.zero_groups > 1 and states.reduced_gradient_bytes > states.kept_gradient_bytes:
                # Hybrid sharding: the wide shard that was all-reduced over copies stays beside the narrow one.
                self.bytes_per_done_weight += states.reduced_gradient_bytes * states.owned / stage.weights
        if has_buckets(layout) and summed_micro_batches == 1:  # split experts are in no bucket, so theirs are new
            unbucketed_bytes = states.kept_gradient_bytes * _unbucketed_experts(layout, stage)
            self.bytes_per_done_weight = unbucketed_bytes / stage.layer_weights

        self.deferred_weights = _deferred_weights(levers, stage, states) if is_limited else 0
        """Weights of the last layers whose updates are deferred until after backward and keep their gradients."""
        owned_share = states.owned / stage.weights
        deferred_gradient_bytes = round(self.element_bytes * owned_share * self.deferred_weights)
        own_head_bytes = self.element_bytes * stage.vocabulary * states.owned // stage.weights
        self.limit_bytes = deferred_gradient_bytes + IN_FLIGHT_BYTES if is_limited else None
        """The most bytes of complete gradients that wait for the link to the host; None: all stay to backward's end."""
        self.waiting_at_end_bytes = deferred_gradient_bytes + max(IN_FLIGHT_BYTES, own_head_bytes) if is_limited else 0
        """Gradients of updates that are still pending when backward with updates inside it ends."""
        self.from_last_step_bytes = round(shard_bytes * _not_waited_for(layout, stage, states, is_limited=is_limited))
        """Gradients of the step before whose updates may still be pending when forward begins."""
        if is_limited:
            others_bytes = 0 if stage.embedding else IN_FLIGHT_BYTES
            self.from_last_step_bytes = min(self.from_last_step_bytes, deferred_gradient_bytes + others_bytes)

        # The output projection is part of FSDP2's root, whose gradients are reduced after backward, even where updates
        # run inside it.
        makes_head = stage.span.has_head and not self.add_in_place
        waits = not levers.update_in_backward or stage.shares_embedding or layout.zero > 0
        head_bytes = self.element_bytes * stage.vocabulary if makes_head else 0
        self.head_bytes = head_bytes if waits else 0
        """The output projection's gradient, until the embedding's is added to it or FSDP2 reduces it with the root."""
        self.sent_head_bytes = head_bytes if waits or is_limited else 0
        """The same while its own update is in flight, until the next matrix's update is sent."""

    def done(self, weights: int) -> int:
        """Bytes of complete gradients of `weights` weights."""
        grown_bytes = round(self.bytes_per_done_weight * weights)
        return grown_bytes if self.limit_bytes is None else min(grown_bytes, self.limit_bytes)

    def head(self, visit: LayerVisit, moment: LayerMoment) -> int:
        """The output projection's gradient at a moment of a layer."""
        if not self.limit_bytes:
            return self.head_bytes
        complete_weights = visit.done_weights + moment.complete_weights - moment.new_weights
        return self.sent_head_bytes if complete_weights <= self.deferred_weights else self.head_bytes

    def of_layer(self, moment: LayerMoment, done_bytes: int) -> int:
        """Gradients of the layer at work, beside `done_bytes` of layers that are done."""
        new_bytes, copies_bytes = self.element_bytes * moment.new_weights, self.element_bytes * moment.weight_copies
        if self.add_in_place:
            return new_bytes + copies_bytes
        complete_bytes = self.element_bytes * moment.complete_weights
        if self.limit_bytes is not None:  # the running operation's own gradient is not queued yet, so not limited
            complete_bytes = min(complete_bytes, self.limit_bytes - done_bytes + new_bytes)
        return complete_bytes + copies_bytes


def has_buckets(layout: Layout) -> bool:
    """Whether DDP keeps gradients in buckets between steps; pipelines (parallel/pipeline.py) do not use DDP."""
    return layout.zero == 0 and layout.gradient_ranks > 1 and layout.pipeline == 1


def _unbucketed_experts(layout: Layout, stage: StageMemory) -> int:
    """Weights of experts split over expert ranks: in no bucket, as other data ranks hold other experts."""
    return stage.params.experts if layout.expert > 1 else 0


def _earlier_bytes(layout: Layout, stage: StageMemory, states: States, summed_micro_batches: int) -> int:
    """Gradients that exist before a micro-batch's backward: DDP's buckets, and sums over earlier micro-batches.

    ZeRO-1 sums whole gradients (parallel/data.py). Under DDP the sums are beside the buckets: the optimizer has dropped
    the bucket views, and under `no_sync` autograd allocates tensors, which the last micro-batch copies into buckets.
    """
    whole = stage.weights - stage.padding_weights
    if has_buckets(layout):
        return states.kept_gradient_bytes * (min(summed_micro_batches, 2) * whole - _unbucketed_experts(layout, stage))
    if summed_micro_batches == 1:
        return 0
    return states.reduced_gradient_bytes * whole if layout.zero == 1 else states.kept_gradient_bytes * states.owned


def _shard_bytes(layout: Layout, stage: StageMemory, states: States) -> float:
    """Bytes of gradient shard per weight of the stage; experts are sharded over fewer ranks than other weights."""
    if layout.expert > 1 and layout.zero:
        owned_in_layers = stage.layer_params.shard(states.ranks, layout.expert)
        return states.kept_gradient_bytes * owned_in_layers / stage.layer_weights
    return states.kept_gradient_bytes * states.owned / stage.weights


def _deferred_weights(levers: Levers, stage: StageMemory, states: States) -> int:
    """Weights whose updates are deferred until after backward: whole matrices, from the last layer back, and a
    proportional part of the vectors in those layers.

    levers/offload.py chooses matrices by the bytes of the updated weight, or of its shard.
    """
    share = states.owned / stage.weights
    matrices = stage.last_layer_matrices[::-1] * (stage.span.last - stage.span.first)
    sizes_bytes = (states.updated_bytes * share * matrix for matrix in matrices)
    count = count_that_fit(sizes_bytes, deferred_bytes(levers.offload_gradient_bytes))
    return math.ceil(stage.layer_weights * sum(matrices[:count]) / sum(matrices))


def _not_waited_for(layout: Layout, stage: StageMemory, states: States, *, is_limited: bool) -> int:
    """Weights with states on the host whose updates may be pending when the next forward pass looks up the embedding.

    That lookup has waited for the embedding's own update, the last of a step (under FSDP2 for the root's too). With
    updates inside backward only deferred ones are sent after the embedding's, if it has a weight of its own.
    """
    on_gpu_bytes, on_host_bytes = states.resident.moments, states.host.moments
    offloaded = stage.weights * on_host_bytes // max(1, on_host_bytes + on_gpu_bytes)
    if on_gpu_bytes:
        return offloaded
    waited_for = stage.outside if layout.zero else stage.vocabulary
    return offloaded - (stage.embedding if is_limited else waited_for)
