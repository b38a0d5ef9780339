"""Gradients of weights on one rank: what is there before backward, how they grow in it, and what is left after a step.

While backward is at layer k (parallel/data.py, train/step.py):

- one GPU, one micro-batch: they grow from the head down, `element` bytes each.
- accumulation and DDP: all are there already; those of the operation at work exist twice until they are added.
- FSDP2: the layer at work has whole ones; layers done have shards, in the dtype they are reduced in. The root's and the
  embedding's stay whole until its last callback.
- update in backward: those of the layer at work, and the output projection's where the embedding shares it.
- offload: as without; where they are updated inside backward, what waits for the link is bounded. Updates that were put
  off keep their gradients into the next forward pass (levers/state_link.py).
"""

import math
from typing import NamedTuple

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.levers.policy.offload import IN_FLIGHT_BYTES, bounds_gradients, put_off_bytes, whole_that_fit
from tightfit.memory.formulas.layer_moments import LayerMoment
from tightfit.memory.formulas.stage import LayerVisit, StageMemory
from tightfit.memory.formulas.states import States
from tightfit.memory.formulas.working_weights import WholeWeights


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
    left_bytes: int
    """Of the step before, whose updates have not been waited for when forward begins."""
    head_bytes: int
    """The output projection's, until the embedding's joins it or FSDP2 reduces it with the root,"""
    head_in_flight_bytes: int
    """and as it goes to the host: it is waited for when the next one is sent,"""
    put_off_weights: int
    """which the updates of the last of so many weights are not, as they are put off until backward is over."""

    def done(self, weights: int) -> int:
        """Of so many weights whose gradients are complete."""
        grown_bytes = round(self.bytes_per_done_weight * weights)
        return grown_bytes if self.limit_bytes is None else min(grown_bytes, self.limit_bytes)

    def head(self, visit: LayerVisit, moment: LayerMoment) -> int:
        """The output projection's, at a moment of a layer."""
        completed = visit.done_weights + moment.made_weights - moment.new_weights
        return self.head_in_flight_bytes if completed <= self.put_off_weights else self.head_bytes

    def at_work(self, moment: LayerMoment, done_bytes: int) -> int:
        """Of the layer at work, beside `done_bytes` of others."""
        new_bytes, copies_bytes = self.element_bytes * moment.new_weights, self.element_bytes * moment.weight_copies
        if self.add_in_place:
            return new_bytes + copies_bytes
        made_bytes = self.element_bytes * moment.made_weights
        if self.limit_bytes is not None:  # what the operation at work makes is not on its way yet
            made_bytes = min(made_bytes, self.limit_bytes - done_bytes + new_bytes)
        return made_bytes + copies_bytes


def make_gradients(
    layout: Layout, levers: Levers, stage: StageMemory, states: States, weights: WholeWeights, summed: int
) -> Gradients:
    """Of a rank that sums `summed` micro-batches."""
    owned, element_bytes = states.owned, states.element_bytes
    kept_bytes = states.kept_gradient_bytes
    apart = stage.params.experts if layout.expert > 1 else 0
    summed_bytes = states.reduced_gradient_bytes if layout.zero == 1 else kept_bytes
    earlier_bytes = summed_bytes * _earlier_weights(layout, owned, stage.weights - stage.padding_weights, apart, summed)
    adds_in_place = earlier_bytes > 0 and layout.zero == 0
    is_limited = bounds_gradients(levers)
    put_off = _put_off_weights(levers, stage, states) if is_limited else 0
    late_bytes = round(element_bytes * owned / max(1, stage.weights) * put_off)
    shard_bytes = kept_bytes * owned / max(1, stage.weights)
    if layout.expert > 1 and layout.zero:  # fewer ranks share experts than share the rest
        shard_bytes = kept_bytes * stage.layer_params.shard(states.ranks, layout.expert) / stage.layer_weights
    vocabulary_bytes = element_bytes * stage.vocabulary * owned // max(1, stage.weights)
    stays_bytes = summed_bytes if weights.sums_whole else shard_bytes
    if layout.zero and layout.copies > 1 and states.reduced_gradient_bytes > kept_bytes:
        # Beside the narrow shard, what groups that each hold a copy summed it from: FSDP2 keeps that to backward's end.
        stays_bytes += states.reduced_gradient_bytes * owned / max(1, stage.weights)
    if has_buckets(layout) and summed == 1:
        grown_bytes = kept_bytes * apart / max(1, stage.layer_weights)  # of experts alone, which are in no bucket
    else:
        grown_bytes = 0 if earlier_bytes or (levers.update_in_backward and not is_limited) else stays_bytes
    makes_head = stage.stage.has_head and not adds_in_place
    # FSDP2 reduces the root's gradients when backward is over, be they updated inside it or not.
    head_waits = makes_head and (not levers.update_in_backward or stage.shares_embedding or layout.zero > 0)
    return Gradients(
        element_bytes=element_bytes,
        earlier_bytes=earlier_bytes,
        add_in_place=adds_in_place,
        bytes_per_done_weight=grown_bytes,
        limit_bytes=late_bytes + IN_FLIGHT_BYTES if is_limited else None,
        waiting_at_end_bytes=late_bytes + max(IN_FLIGHT_BYTES, vocabulary_bytes) if is_limited else 0,
        left_bytes=_left_bytes(
            stage, states, shard_bytes, late_bytes, is_limited=is_limited, is_sharded=layout.zero > 0
        ),
        head_bytes=element_bytes * stage.vocabulary if head_waits else 0,
        head_in_flight_bytes=element_bytes * stage.vocabulary if head_waits or (is_limited and makes_head) else 0,
        put_off_weights=put_off,
    )


def _put_off_weights(levers: Levers, stage: StageMemory, states: States) -> int:
    """Weights whose updates are put off until backward is over: whole matrices, from the last layer back, and the few
    others of their layers.

    levers/offload.py chooses them by their bytes as they are updated; of a shard, by the shard's.
    """
    share = states.owned / max(1, stage.weights)
    matrices = stage.last_layer_matrices[::-1] * (stage.stage.last - stage.stage.first)
    sizes_bytes = (states.updated_bytes * share * matrix for matrix in matrices)
    count = whole_that_fit(sizes_bytes, put_off_bytes(levers.offload_gradient_bytes))
    return math.ceil(stage.layer_weights * sum(matrices[:count]) / sum(matrices))


def _earlier_weights(layout: Layout, owned: int, whole: int, apart: int, summed: int) -> int:
    """DDP's buckets stay; sums stay while there are more micro-batches, unsharded under ZeRO-1 (parallel/data.py).

    Under DDP those sums are beside the buckets: the optimizer has dropped the views, and without synchronisation
    autograd makes tensors of its own, which the last micro-batch copies into the buckets. Experts that are `apart`, as
    other ranks hold other ones, are in no bucket.
    """
    if has_buckets(layout):
        return whole - apart if summed == 1 else 2 * whole - apart
    if summed == 1:
        return 0
    return whole if layout.zero == 1 else owned


def has_buckets(layout: Layout) -> bool:
    """Whether DDP keeps gradients in buckets between steps; parallel/pipeline.py has none."""
    return layout.zero == 0 and layout.reducing > 1 and layout.pipeline == 1


def _left_bytes(
    stage: StageMemory,
    states: States,
    shard_bytes: float,
    late_bytes: int,
    *,
    is_limited: bool,
    is_sharded: bool,
) -> int:
    """Gradients of matrices that are away (`shard_bytes` a weight), when the next forward pass looks up the embedding.

    Its own update, the last of a step, has then been waited for, and under FSDP2 the root's. Of updates inside backward
    so have been all but those that were put off, if the embedding has one of its own.
    """
    away = stage.weights * states.host_moments // max(1, states.host_moments + states.moments)
    if not states.moments:
        waited_for = stage.root + stage.embedding if is_sharded else stage.vocabulary
        away -= stage.embedding if is_limited else waited_for
    away_bytes = round(shard_bytes * away)
    if not is_limited:
        return away_bytes
    return min(away_bytes, late_bytes + (0 if stage.embedding else IN_FLIGHT_BYTES))
