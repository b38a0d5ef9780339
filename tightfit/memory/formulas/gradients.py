"""Gradients of weights on one rank: what is there before backward, how they grow in it, and what is left after a step.

While backward is at layer k (parallel/data.py, train/step.py):

- one GPU, one micro-batch: they grow from the head down, `element` bytes each.
- accumulation and DDP: all are there already; those of the operation at work exist twice until they are added.
- FSDP2: the layer at work has whole ones; layers done have shards, in the dtype they are reduced in. The root's and the
  embedding's stay whole until its last callback.
- update in backward: those of the layer at work, and the output projection's where the embedding shares it. Norms and
  biases keep theirs to the end, which is less than a thousandth and left out.
- offload: as without; where they are updated inside backward, what waits for the link is bounded. Deferred
  updates keep their gradients into the next forward pass (levers/state_link.py).
"""

import math

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.levers.policy.offload import IN_FLIGHT_BYTES, bounds_gradients, deferred_bytes, whole_that_fit
from tightfit.memory.formulas.layer_moments import LayerMoment
from tightfit.memory.formulas.stage import LayerVisit, StageMemory
from tightfit.memory.formulas.states import States
from tightfit.memory.formulas.working_weights import WorkingWeights


class Gradients:
    """How gradients come and go."""

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
        """Of a rank that sums so many micro-batches, so far of `share_with_sums` of its layers."""
        is_limited = bounds_gradients(levers)
        self.element_bytes = states.element_bytes
        """Of one as backward makes it."""
        self.earlier_bytes = _earlier_bytes(layout, stage, states, summed_micro_batches)
        """There from one micro-batch to the next: DDP's buckets, or sums."""
        if share_with_sums < 1:
            missing_share = (1 - share_with_sums) * self.earlier_bytes * stage.layer_weights / stage.weights
            self.earlier_bytes -= round(missing_share)
        one_by_one = weights.fsdp2.adds_one_by_one and weights.sums_whole
        self.add_in_place = self.earlier_bytes > 0 and (layout.zero == 0 or one_by_one)
        """Whether new ones are added to whole ones that are there: none waits for the rest of its layer."""

        shard_bytes = _shard_bytes(layout, stage, states)
        self.bytes_per_done_weight = 0.0
        """What a weight adds once its gradient is complete, where it is not there already."""
        if not self.earlier_bytes and (is_limited or not levers.update_in_backward):
            self.bytes_per_done_weight = states.reduced_gradient_bytes if weights.sums_whole else shard_bytes
            if layout.zero and layout.copies > 1 and states.reduced_gradient_bytes > states.kept_gradient_bytes:
                # Beside the narrow shard, what groups that each hold a copy summed it from, to backward's end.
                self.bytes_per_done_weight += states.reduced_gradient_bytes * states.owned / stage.weights
        if has_buckets(layout) and summed_micro_batches == 1:  # in which experts apart are not
            unbucketed_bytes = states.kept_gradient_bytes * _unbucketed_experts(layout, stage)
            self.bytes_per_done_weight = unbucketed_bytes / stage.layer_weights

        self.deferred_weights = _deferred_weights(levers, stage, states) if is_limited else 0
        """Weights of the last layers whose updates are deferred until backward is over: theirs are not sent before."""
        owned_share = states.owned / stage.weights
        deferred_gradient_bytes = round(self.element_bytes * owned_share * self.deferred_weights)
        own_head_bytes = self.element_bytes * stage.vocabulary * states.owned // stage.weights
        self.limit_bytes = deferred_gradient_bytes + IN_FLIGHT_BYTES if is_limited else None
        """At most so many bytes of complete ones wait for the link to the host; None where all stay to the end."""
        self.waiting_at_end_bytes = deferred_gradient_bytes + max(IN_FLIGHT_BYTES, own_head_bytes) if is_limited else 0
        """Of updates inside backward, those that are not waited for when it ends."""
        self.from_last_step_bytes = round(shard_bytes * _not_waited_for(layout, stage, states, is_limited=is_limited))
        """Of the step before, whose updates have not been waited for when forward begins."""
        if is_limited:
            others_bytes = 0 if stage.embedding else IN_FLIGHT_BYTES
            self.from_last_step_bytes = min(self.from_last_step_bytes, deferred_gradient_bytes + others_bytes)

        # A new gradient of the output projection; FSDP2 reduces the root's when backward is over, updated inside it or
        # not.
        makes_head = stage.span.has_head and not self.add_in_place
        waits = not levers.update_in_backward or stage.shares_embedding or layout.zero > 0
        head_bytes = self.element_bytes * stage.vocabulary if makes_head else 0
        self.head_bytes = head_bytes if waits else 0
        """The output projection's, until the embedding's joins it or FSDP2 reduces it with the root."""
        self.sent_head_bytes = head_bytes if waits or is_limited else 0
        """The same on its way to the host, until the next one is sent."""

    def done(self, weights: int) -> int:
        """Of so many weights whose gradients are complete."""
        grown_bytes = round(self.bytes_per_done_weight * weights)
        return grown_bytes if self.limit_bytes is None else min(grown_bytes, self.limit_bytes)

    def head(self, visit: LayerVisit, moment: LayerMoment) -> int:
        """The output projection's at a moment of a layer."""
        if not self.limit_bytes:
            return self.head_bytes
        complete_weights = visit.done_weights + moment.complete_weights - moment.new_weights
        return self.sent_head_bytes if complete_weights <= self.deferred_weights else self.head_bytes

    def of_layer(self, moment: LayerMoment, done_bytes: int) -> int:
        """Of the layer at work, beside `done_bytes` of others."""
        new_bytes, copies_bytes = self.element_bytes * moment.new_weights, self.element_bytes * moment.weight_copies
        if self.add_in_place:
            return new_bytes + copies_bytes
        complete_bytes = self.element_bytes * moment.complete_weights
        if self.limit_bytes is not None:  # what the operation at work makes is not on its way yet
            complete_bytes = min(complete_bytes, self.limit_bytes - done_bytes + new_bytes)
        return complete_bytes + copies_bytes


def has_buckets(layout: Layout) -> bool:
    """Whether DDP keeps gradients in buckets between steps; parallel/pipeline.py has none."""
    return layout.zero == 0 and layout.reducing > 1 and layout.pipeline == 1


def _unbucketed_experts(layout: Layout, stage: StageMemory) -> int:
    """Experts that are in no bucket, as other ranks hold other ones."""
    return stage.params.experts if layout.expert > 1 else 0


def _earlier_bytes(layout: Layout, stage: StageMemory, states: States, summed_micro_batches: int) -> int:
    """DDP's buckets stay; sums stay while there are more micro-batches, unsharded under ZeRO-1 (parallel/data.py).

    Under DDP those sums are beside the buckets: the optimizer has dropped the views, and without synchronisation
    autograd makes tensors of its own, which the last micro-batch copies into the buckets.
    """
    whole = stage.weights - stage.padding_weights
    if has_buckets(layout):
        return states.kept_gradient_bytes * (min(summed_micro_batches, 2) * whole - _unbucketed_experts(layout, stage))
    if summed_micro_batches == 1:
        return 0
    return states.reduced_gradient_bytes * whole if layout.zero == 1 else states.kept_gradient_bytes * states.owned


def _shard_bytes(layout: Layout, stage: StageMemory, states: States) -> float:
    """This rank's share of a weight's gradient; fewer ranks share experts than share the rest."""
    if layout.expert > 1 and layout.zero:
        owned_in_layers = stage.layer_params.shard(states.ranks, layout.expert)
        return states.kept_gradient_bytes * owned_in_layers / stage.layer_weights
    return states.kept_gradient_bytes * states.owned / stage.weights


def _deferred_weights(levers: Levers, stage: StageMemory, states: States) -> int:
    """Weights whose updates are deferred until backward is over: whole matrices, from the last layer back, and the few
    others of their layers.

    levers/offload.py chooses them by their bytes as they are updated; of a shard, by the shard's.
    """
    share = states.owned / stage.weights
    matrices = stage.last_layer_matrices[::-1] * (stage.span.last - stage.span.first)
    sizes_bytes = (states.updated_bytes * share * matrix for matrix in matrices)
    count = whole_that_fit(sizes_bytes, deferred_bytes(levers.offload_gradient_bytes))
    return math.ceil(stage.layer_weights * sum(matrices[:count]) / sum(matrices))


def _not_waited_for(layout: Layout, stage: StageMemory, states: States, *, is_limited: bool) -> int:
    """Weights of matrices whose states are on the host and are updated still when the next forward pass looks up the
    embedding.

    Its own update, the last of a step, has then been waited for, and under FSDP2 the root's. Of updates inside backward
    so have been all but those that were deferred, if the embedding has one of its own.
    """
    on_gpu_bytes, on_host_bytes = states.resident.moments, states.host.moments
    offloaded = stage.weights * on_host_bytes // max(1, on_host_bytes + on_gpu_bytes)
    if on_gpu_bytes:
        return offloaded
    waited_for = stage.outside if layout.zero else stage.vocabulary
    return offloaded - (stage.embedding if is_limited else waited_for)
