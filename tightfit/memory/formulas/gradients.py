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
from tightfit.levers.policy.offload import IN_FLIGHT_BYTES, bounds_gradients, count_that_fit, deferred_bytes
from tightfit.memory.formulas.in_flight import InFlight
from tightfit.memory.formulas.layer_moments import LayerMoment
from tightfit.memory.formulas.rank import RankMemory
from tightfit.memory.formulas.stage import LayerVisit


class Gradients:
    """Bytes of a rank's weight gradients at the moments of a step, around one backward."""

    def __init__(self, rank: RankMemory, flying: InFlight) -> None:
        levers, stage, states, layout = rank.levers, rank.stage, rank.states, rank.layout
        self.element_bytes = states.element_bytes
        is_limited = bounds_gradients(levers)
        self.earlier_bytes = _earlier_bytes(rank, flying)
        one_by_one = rank.overheads.fsdp2.adds_one_by_one and rank.sums_whole
        self.add_in_place = self.earlier_bytes > 0 and (layout.zero == 0 or one_by_one)
        """Whether a new gradient is added to an existing whole one at once, not when its layer is complete."""
        shard_bytes = _shard_bytes(rank)
        self.bytes_per_done_weight = 0.0
        """Bytes that each weight of a finished layer adds; 0 where its gradient existed before backward."""
        if has_buckets(layout) and flying.summed_micro_batches == 1:  # split experts are in no bucket: theirs are new
            self.bytes_per_done_weight = states.kept_gradient_bytes * stage.apart_weights / stage.layer_weights
        elif not self.earlier_bytes and (is_limited or not levers.update_in_backward):
            self.bytes_per_done_weight = states.reduced_gradient_bytes if rank.sums_whole else shard_bytes
            if layout.zero and layout.zero_groups > 1 and states.reduced_gradient_bytes > states.kept_gradient_bytes:
                # Hybrid sharding: the wide shard that was all-reduced over copies stays beside the narrow one.
                self.bytes_per_done_weight += states.reduced_gradient_bytes * states.owned / stage.weights
        self.from_last_step_bytes = round(shard_bytes * _not_waited_for(rank, is_limited=is_limited))
        """Gradients of the step before whose updates may still be pending when forward begins."""

        self.deferred_weights = self.waiting_at_end_bytes = 0
        self.limit_bytes: int | None = None
        """The most bytes of complete gradients that wait for the link to the host; None: all stay to backward's end."""
        if is_limited:
            self.deferred_weights = _deferred_weights(rank)
            owned_share = states.owned / stage.weights
            deferred_gradient_bytes = round(states.element_bytes * owned_share * self.deferred_weights)
            self.limit_bytes = deferred_gradient_bytes + IN_FLIGHT_BYTES
            # Updates that are pending when backward ends: deferred ones, and those in flight or that of the head.
            own_head_bytes = states.element_bytes * stage.vocabulary * states.owned // stage.weights
            self.waiting_at_end_bytes = deferred_gradient_bytes + max(IN_FLIGHT_BYTES, own_head_bytes)
            sent_later_bytes = deferred_gradient_bytes + (0 if stage.embedding else IN_FLIGHT_BYTES)
            self.from_last_step_bytes = min(self.from_last_step_bytes, sent_later_bytes)

        # The output projection is part of FSDP2's root, whose gradients are reduced after backward, even where updates
        # run inside it.
        waits = not levers.update_in_backward or stage.shares_embedding or layout.zero > 0
        makes_head = stage.span.has_head and not self.add_in_place
        head_bytes = states.element_bytes * stage.vocabulary if makes_head else 0
        self.head_bytes = head_bytes if waits else 0
        """The output projection's gradient, until the embedding's is added to it or FSDP2 reduces it with the root."""
        self.sent_head_bytes = head_bytes if waits or self.limit_bytes else 0
        """The same while its own update is in flight, until the next matrix's update is sent."""

    def done(self, weights: int) -> int:
        """Bytes of complete gradients of `weights` weights."""
        grown_bytes = round(self.bytes_per_done_weight * weights)
        return grown_bytes if self.limit_bytes is None else min(grown_bytes, self.limit_bytes)

    def head(self, visit: LayerVisit, moment: LayerMoment) -> int:
        """The output projection's gradient at a moment of a layer."""
        is_sent = self.limit_bytes is not None and visit.done_weights + moment.added_weights <= self.deferred_weights
        return self.sent_head_bytes if is_sent else self.head_bytes

    def of_layer(self, moment: LayerMoment, done_bytes: int) -> int:
        """Gradients of the layer at work, beside `done_bytes` of layers that are done."""
        new_bytes = self.element_bytes * (moment.complete_weights - moment.added_weights)
        copies_bytes = self.element_bytes * moment.weight_copies
        if self.add_in_place:
            return new_bytes + copies_bytes
        complete_bytes = self.element_bytes * moment.complete_weights
        if self.limit_bytes is not None:  # the running operation's own gradient is not queued yet, so not limited
            complete_bytes = min(complete_bytes, self.limit_bytes - done_bytes + new_bytes)
        return complete_bytes + copies_bytes


def has_buckets(layout: Layout) -> bool:
    """Whether DDP keeps gradients in buckets between steps; pipelines (parallel/pipeline.py) do not use DDP."""
    return layout.zero == 0 and layout.gradient_ranks > 1 and layout.pipeline == 1


def _earlier_bytes(rank: RankMemory, flying: InFlight) -> int:
    """Gradients that exist before a micro-batch's backward: DDP's buckets, and sums over earlier micro-batches.

    ZeRO-1 sums whole gradients (parallel/data.py). Under DDP the sums are beside the buckets: the optimizer has dropped
    the bucket views, and under `no_sync` autograd allocates tensors, which the last micro-batch copies into buckets.
    """
    stage, states, summed = rank.stage, rank.states, flying.summed_micro_batches
    whole = stage.weights - stage.padding_weights
    if has_buckets(rank.layout):
        return states.kept_gradient_bytes * (min(summed, 2) * whole - stage.apart_weights)
    if summed == 1:
        return 0
    sum_bytes = states.kept_gradient_bytes * states.owned
    if rank.layout.zero == 1:
        sum_bytes = states.reduced_gradient_bytes * whole
    return sum_bytes - round((1 - flying.share_with_sums) * sum_bytes * stage.layer_weights / stage.weights)


def _shard_bytes(rank: RankMemory) -> float:
    """Bytes of gradient shard per weight of the stage; experts are sharded over fewer ranks than other weights."""
    layout, stage, states = rank.layout, rank.stage, rank.states
    if layout.expert > 1 and layout.zero:
        owned_in_layers = stage.layer_params.shard(states.ranks, layout.expert)
        return states.kept_gradient_bytes * owned_in_layers / stage.layer_weights
    return states.kept_gradient_bytes * states.owned / stage.weights


def _deferred_weights(rank: RankMemory) -> int:
    """Weights whose updates are deferred until after backward and keep their gradients: whole matrices from the last
    layer back, chosen by the bytes of the updated weight or its shard (levers/offload.py), and vectors beside them."""
    stage, states = rank.stage, rank.states
    share = states.owned / stage.weights
    matrices = stage.last_layer_matrices[::-1] * (stage.span.last - stage.span.first)
    sizes_bytes = (states.updated_bytes * share * matrix for matrix in matrices)
    count = count_that_fit(sizes_bytes, deferred_bytes(rank.levers.offload_gradient_bytes))
    return math.ceil(stage.layer_weights * sum(matrices[:count]) / sum(matrices))


def _not_waited_for(rank: RankMemory, *, is_limited: bool) -> int:
    """Weights with states on the host whose updates may be pending when the next forward pass looks up the embedding:
    all but the embedding's own, the last of a step (under FSDP2 the root's too). With updates inside backward only
    deferred ones are sent after the embedding's, if it has a weight of its own."""
    stage = rank.stage
    on_gpu_bytes, on_host_bytes = rank.states.resident.moments, rank.states.host.moments
    offloaded = stage.weights * on_host_bytes // max(1, on_host_bytes + on_gpu_bytes)
    if on_gpu_bytes:
        return offloaded
    waited_for = stage.outside if rank.layout.zero else stage.vocabulary
    return offloaded - (stage.embedding if is_limited else waited_for)
