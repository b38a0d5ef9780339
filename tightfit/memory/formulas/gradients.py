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
from typing import NamedTuple

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.levers.policy.offload import IN_FLIGHT_BYTES, bounds_gradients, deferred_bytes, whole_that_fit
from tightfit.memory.formulas.layer_moments import LayerMoment
from tightfit.memory.formulas.stage import LayerVisit, StageMemory
from tightfit.memory.formulas.states import States


class Gradients(NamedTuple):
    """How gradients come and go."""

    element_bytes: int
    """Of one as backward makes it."""
    earlier_bytes: int
    """There from one micro-batch to the next: DDP's buckets, or sums."""
    add_in_place: bool
    """Whether new ones are added to whole ones that are there."""
    bytes_per_done_weight: float
    """What a weight adds once its gradient is complete, where it is not there already."""
    limit_bytes: int | None
    """At most so many bytes of complete ones wait for the link to the host; None where all stay to the step's end."""
    waiting_at_end_bytes: int
    """Of updates inside backward, those that are not waited for when it ends."""
    from_last_step_bytes: int
    """Of the step before, whose updates have not been waited for when forward begins."""
    head_bytes: int
    """The output projection's, until the embedding's joins it or FSDP2 reduces it with the root."""
    sent_head_bytes: int
    """The same on its way to the host, until the next one is sent."""
    deferred_weights: int
    """Weights of the last layers whose updates are deferred until backward is over: theirs are not sent before."""

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


def make_gradients(
    layout: Layout,
    levers: Levers,
    stage: StageMemory,
    states: States,
    *,
    sums_whole: bool,
    summed_micro_batches: int,
    share_with_sums: float = 1.0,
) -> Gradients:
    """Of a rank that sums so many micro-batches, so far of `share_with_sums` of its layers; `sums_whole`: whole
    gradients, though weights are sharded."""
    element_bytes, is_limited = states.element_bytes, bounds_gradients(levers)
    earlier_bytes = _earlier_bytes(layout, stage, states, summed_micro_batches)
    if share_with_sums < 1:
        earlier_bytes -= round((1 - share_with_sums) * earlier_bytes * stage.layer_weights / stage.weights)
    adds_in_place = earlier_bytes > 0 and layout.zero == 0
    grown_bytes = 0.0
    if not earlier_bytes and (is_limited or not levers.update_in_backward):
        grown_bytes = _grown_bytes(layout, stage, states, sums_whole=sums_whole)
    if has_buckets(layout) and summed_micro_batches == 1:  # in which experts apart are not
        grown_bytes = states.kept_gradient_bytes * _unbucketed_experts(layout, stage) / stage.layer_weights
    deferred = _deferred_weights(levers, stage, states) if is_limited else 0
    deferred_gradient_bytes = round(element_bytes * states.owned / stage.weights * deferred)
    own_head_bytes = element_bytes * stage.vocabulary * states.owned // stage.weights
    # A new gradient of the output projection; FSDP2 reduces the root's when backward is over, updated inside it or not.
    makes_head = stage.span.has_head and not adds_in_place
    head_waits = makes_head and (not levers.update_in_backward or stage.shares_embedding or layout.zero > 0)
    head_bytes = element_bytes * stage.vocabulary
    return Gradients(
        element_bytes=element_bytes,
        earlier_bytes=earlier_bytes,
        add_in_place=adds_in_place,
        bytes_per_done_weight=grown_bytes,
        limit_bytes=deferred_gradient_bytes + IN_FLIGHT_BYTES if is_limited else None,
        waiting_at_end_bytes=deferred_gradient_bytes + max(IN_FLIGHT_BYTES, own_head_bytes) if is_limited else 0,
        from_last_step_bytes=_from_last_step_bytes(
            layout, stage, states, deferred_gradient_bytes, is_limited=is_limited
        ),
        head_bytes=head_bytes if head_waits else 0,
        sent_head_bytes=head_bytes if head_waits or (is_limited and makes_head) else 0,
        deferred_weights=deferred,
    )


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


def _grown_bytes(layout: Layout, stage: StageMemory, states: States, *, sums_whole: bool) -> float:
    """What a complete gradient leaves on this rank: itself, or its shard."""
    grown_bytes = states.reduced_gradient_bytes if sums_whole else _shard_bytes(layout, stage, states)
    if layout.zero and layout.copies > 1 and states.reduced_gradient_bytes > states.kept_gradient_bytes:
        # Beside the narrow shard, what groups that each hold a copy summed it from: FSDP2 keeps that to backward's end.
        grown_bytes += states.reduced_gradient_bytes * states.owned / stage.weights
    return grown_bytes


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


def _from_last_step_bytes(
    layout: Layout, stage: StageMemory, states: States, deferred_gradient_bytes: int, *, is_limited: bool
) -> int:
    """Gradients of matrices whose states are on the host, when the next forward pass looks up the embedding.

    Its own update, the last of a step, has then been waited for, and under FSDP2 the root's. Of updates inside backward
    so have been all but those that were deferred, if the embedding has one of its own.
    """
    on_gpu_bytes, on_host_bytes = states.resident.moments, states.host.moments
    offloaded = stage.weights * on_host_bytes // max(1, on_host_bytes + on_gpu_bytes)
    if not on_gpu_bytes:
        waited_for = stage.outside if layout.zero else stage.vocabulary
        offloaded -= stage.embedding if is_limited else waited_for
    waiting_bytes = round(_shard_bytes(layout, stage, states) * offloaded)
    if not is_limited:
        return waiting_bytes
    return min(waiting_bytes, deferred_gradient_bytes + (0 if stage.embedding else IN_FLIGHT_BYTES))
