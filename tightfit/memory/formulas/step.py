"""The moments of a step: forward, the loss, backward, the optimizer; and of evaluation, which saves no activations.

Forward fills memory layer by layer and is fullest at its end. In backward activations shrink from the last layer to the
first while gradients of weights grow (gradients.py): it begins at the loss, goes through the layers, under FSDP2 with a
reduce-scatter after each, and ends at the embedding. The update has all gradients and its own temporaries beside them.
"""

from tightfit.jobs.precision import FLOAT32_BYTES, INT64_BYTES
from tightfit.jobs.state_format import is_torch_adamw
from tightfit.levers.policy.updates import BUCKET_BYTES, FACTORED_CHUNK_ELEMENTS
from tightfit.memory.formulas.gradients import has_buckets
from tightfit.memory.formulas.local_shape import LocalShape
from tightfit.memory.formulas.rank import RankMemory
from tightfit.memory.formulas.stage import LayerVisit
from tightfit.memory.formulas.story import StepMoment, fullest

SMALL_EMBEDDING_TOKENS = 3072
ROWS_PER_PARTIAL = 10
SORTED_INDICES = 4
"""torch's embedding_dense_backward (EmbeddingBackwardKernel.cu): the most tokens for which it needs no workspace, rows
per partial sum, and int64 indices per token while it sorts them."""


def forward(rank: RankMemory) -> list[StepMoment]:
    """Moments at which forward may be fullest: its end; or its start, with gradients that still wait for offloaded
    updates or weights that FSDP2 gathers."""
    stage, weights, gradients = rank.stage, rank.weights, rank.gradients
    end = StepMoment(
        *stage.saved,
        **rank.with_final_norm,
        at_work=stage.forward_extra_bytes,
        working_weights=weights.in_forward_bytes,
        all_gather=weights.all_gather_buffer(gradients.earlier_bytes),
        teacher=rank.teacher.until_loss,
    )
    moments = [end]
    if rank.teacher.teaching:
        moments.append(StepMoment(earlier_gradients=gradients.earlier_bytes, teacher=rank.teacher.teaching))
    # When the embedding is looked up, updates of the step before may be pending, and their gradients exist.
    at_start = {**rank.throughout, "earlier_gradients": max(gradients.from_last_step_bytes, gradients.earlier_bytes)}
    if rank.resident.staging:
        moments.append(StepMoment(**at_start))
    if rank.stage.span.has_embedding and (table_bytes := _cubic_table_bytes(rank.shape)):
        moments.append(StepMoment(**at_start, at_work=table_bytes))
    if weights.zero:
        moments.append(_last_gathering(rank))
    if weights.zero == 3:
        moments += _first_gathering(rank, StepMoment(**at_start))
    return moments


def _first_gathering(rank: RankMemory, at_start: StepMoment) -> list[StepMoment]:
    """The root and the first group after it, beside both all-gather buffers; since torch 2.15 beside one at a time."""
    weights, element_bytes = rank.weights, rank.states.element_bytes
    root_bytes, after_root_bytes = element_bytes * rank.stage.root, element_bytes * weights.after_root
    moment = at_start._replace(working_weights=root_bytes + after_root_bytes, all_gather=root_bytes + after_root_bytes)
    if not weights.fsdp2.frees_buffer_before_copy:
        return [moment]
    shard_bytes = weights.narrowed(weights.after_root, rank.states.ranks)
    return [
        moment._replace(all_gather=root_bytes + shard_bytes),
        moment._replace(all_gather=after_root_bytes, stream=rank.shape.stream_bytes),
    ]


def _last_gathering(rank: RankMemory) -> StepMoment:
    """The last layer's weights have been gathered; the all-gather buffer of the layer before still exists."""
    return StepMoment(
        *rank.stage.visits[0].saved_before,
        **rank.throughout,
        stream=rank.shape.stream_bytes,
        working_weights=rank.weights.in_forward_bytes,
        all_gather=rank.weights.gathering_buffers(rank.gradients.earlier_bytes),
    )


def loss(rank: RankMemory) -> StepMoment:
    """All activations, a chunk of logits, and the gradients that the fused loss computes in forward."""
    stage, cost = rank.stage, rank.loss
    return StepMoment(
        *stage.saved,
        **rank.with_final_norm,
        working_weights=rank.weights.at_loss_bytes,
        all_gather=rank.weights.all_gather_buffer(rank.gradients.earlier_bytes),
        logits=rank.teacher.chunk or cost.logits,
        teacher=rank.teacher.until_loss + rank.teacher.at_loss,
        hidden=cost.forward - cost.logits - cost.wide_weight_gradient,
        vocabulary_gradients=cost.wide_weight_gradient,
    )


def evaluation(rank: RankMemory) -> StepMoment:
    """The running layer or the loss; DDP's buckets also exist between steps."""
    stage = rank.stage
    evaluated_loss_bytes = rank.loss.evaluated if stage.span.has_head else 0
    return StepMoment(
        working_weights=rank.weights.in_forward_bytes,
        earlier_gradients=rank.shape.element_bytes * stage.weights if has_buckets(rank.layout) else 0,
        stream=rank.shape.stream_bytes,
        at_work=max(stage.working_bytes, evaluated_loss_bytes),
        all_gather=rank.weights.all_gather_buffer(rank.gradients.earlier_bytes),
    )


def backward(rank: RankMemory) -> list[StepMoment]:
    """Moments at which backward may be fullest."""
    stage, weights, visits = rank.stage.span, rank.weights, rank.stage.visits
    moments = [_at_layer(rank, visit) for visit in visits if weights.zero or not visit.is_inner]
    if stage.has_head:
        moments.append(_at_loss(rank))
    if stage.has_embedding and rank.shape.adapted is None:
        moments.append(_at_embedding(rank))
    # ZeRO-1 reduces its whole sums in the last backward of a step, when no other micro-batch is in flight.
    if weights.zero and (rank.gradients.earlier_bytes or not weights.sums_whole):
        moments += [_at_reduction(rank, visit) for visit in visits if not visit.is_inner]
        moments += [_after_experts(rank, visit) for visit in visits if visit.kind.apart_weights]
        if rank.stage.root:
            moments.append(_at_last_reduction(rank))
    elif weights.zero:
        moments.append(_at_first_sums(rank))
    return moments + ([] if rank.second_backward is None else backward(rank.second_backward))


def _at_loss(rank: RankMemory) -> StepMoment:
    """Backward begins: the fused loss's float32 sum is cast to the output projection's gradient."""
    stage, cost, wide_bytes = rank.stage, rank.loss, rank.loss.wide_weight_gradient
    is_cast = wide_bytes and rank.shape.element_bytes < FLOAT32_BYTES and not cost.rounds_in_place
    narrow_bytes = rank.shape.element_bytes * stage.vocabulary if is_cast else 0
    return StepMoment(
        *stage.saved,
        **rank.with_final_norm,
        working_weights=rank.weights.at_loss_bytes,
        vocabulary_gradients=wide_bytes + narrow_bytes,
        logits=cost.backward - wide_bytes,
        all_gather=rank.weights.prefetched(None),
    )


def _at_layer(rank: RankMemory, visit: LayerVisit) -> StepMoment:
    """The fullest moment of a layer."""
    gradients = rank.gradients
    moment = visit.kind.fullest_summing if gradients.add_in_place else visit.moment
    done_bytes = gradients.done(visit.done_weights)
    return StepMoment(
        *visit.saved_before,
        **rank.throughout,
        working_weights=rank.weights.at_layer(visit),
        done_gradients=done_bytes,
        layer_gradients=gradients.of_layer(moment, done_bytes),
        vocabulary_gradients=gradients.head(visit, moment),
        layer_saved=moment.saved_bytes,
        activation_gradients=moment.temporary_bytes,
        kernel_workspace=moment.workspace_bytes,
        all_gather=rank.weights.prefetched(visit),
        reduce_scatter=rank.weights.previous_reduction(visit),
        arriving=rank.arriving_bytes if visit.awaits_input else 0,
    )


def _at_reduction(rank: RankMemory, visit: LayerVisit) -> StepMoment:
    """FSDP2's reduce-scatter after a layer: whole gradients beside the buffer they are reduced from; its weights are
    freed. Where its experts are split, the moment is that of their group, before attention's backward.
    """
    stage, weights, gradients, kind = rank.stage, rank.weights, rank.gradients, visit.kind
    reduced_weights = kind.apart_weights or kind.weights
    complete_bytes = gradients.element_bytes * (reduced_weights - kind.padding_weights)
    moment = StepMoment(
        *visit.saved_before,
        **rank.throughout,
        working_weights=weights.after_layer(visit),
        done_gradients=gradients.done(visit.done_weights),
        layer_gradients=max(complete_bytes, weights.reduced_experts(visit)),
        vocabulary_gradients=gradients.head_bytes,
        layer_saved=kind.reduction_bytes,
        activation_gradients=rank.shape.stream_bytes,
        all_gather=weights.prefetched(visit),
        reduce_scatter=rank.states.reduced_gradient_bytes * reduced_weights,
    )
    if not weights.sums_whole:
        return moment
    unpadded_share = 1 - stage.padding_weights / stage.weights
    return moment._replace(
        earlier_gradients=round(
            rank.states.reduced_gradient_bytes * unpadded_share * (stage.weights - visit.done_weights)
        ),
        done_gradients=weights.shards(visit.done_weights),
        layer_gradients=0,
        vocabulary_gradients=0,
    )


def _after_experts(rank: RankMemory, visit: LayerVisit) -> StepMoment:
    """Attention's backward in a layer with split experts, beside the buffer and the shard of their reduction."""
    return _at_reduction(rank, visit)._replace(
        layer_gradients=rank.weights.reduced_experts(visit),
        layer_saved=visit.kind.attention_bytes,
        activation_gradients=0,
    )


def _at_embedding(rank: RankMemory) -> StepMoment:
    """The end of backward: the embedding's gradient, its kernel's sums, and gradients that stay until backward ends."""
    stage, gradients = rank.stage, rank.gradients
    return StepMoment(
        **rank.at_embedding,
        working_weights=rank.weights.at_embedding_bytes,
        done_gradients=gradients.done(stage.layer_weights),
        vocabulary_gradients=gradients.head_bytes + gradients.element_bytes * stage.vocabulary,
        activation_gradients=rank.shape.stream_bytes + _cubic_table_bytes(rank.shape),
        kernel_workspace=_embedding_sums(rank),
        reduce_scatter=rank.weights.previous_reduction(None),
    )


def _embedding_sums(rank: RankMemory) -> int:
    """Workspace of the embedding's backward for more than a few tokens: a float32 row per distinct token and per
    partial sum, and sorted indices."""
    spec, tokens = rank.shape.spec, rank.shape.tokens
    if tokens <= SMALL_EMBEDDING_TOKENS:
        return 0
    rows = min(tokens, spec.vocab_size) + tokens // ROWS_PER_PARTIAL
    return FLOAT32_BYTES * rows * spec.hidden_size + SORTED_INDICES * INT64_BYTES * tokens


def _at_first_sums(rank: RankMemory) -> StepMoment:
    """The end of a step's first backward under ZeRO-1: gradients of root and embedding, and a float32 copy of the
    larger one, with which the sum over micro-batches begins."""
    stage, gradients = rank.stage, rank.gradients
    largest = max(stage.root, stage.embedding)
    return StepMoment(
        **rank.at_embedding,
        working_weights=rank.weights.at_embedding_bytes,
        done_gradients=gradients.done(stage.layer_weights),
        vocabulary_gradients=gradients.element_bytes * stage.outside + rank.states.reduced_gradient_bytes * largest,
    )


def _at_last_reduction(rank: RankMemory) -> StepMoment:
    """FSDP2's callback after backward: whole gradients of root and embedding, the buffer that the larger is reduced
    from, and the shard that it is reduced to."""
    stage = rank.stage
    largest = max(stage.root, stage.embedding)
    if not rank.weights.fsdp2.frees_gradients_before_shard:
        return _last_reduction(rank, largest, whole=stage.outside, reduced=largest)
    before = _last_reduction(rank, largest, whole=stage.outside, reduced=0)
    after = _last_reduction(rank, largest, whole=stage.outside - largest, reduced=largest)
    return fullest((before, after))


def _last_reduction(rank: RankMemory, buffered: int, *, whole: int, reduced: int) -> StepMoment:
    """A reduce-scatter buffer of `buffered` weights, whole gradients of `whole` weights, and shards of `reduced`."""
    weights, gradients, layer_weights = rank.weights, rank.gradients, rank.stage.layer_weights
    shard_bytes = weights.shards(reduced) if gradients.bytes_per_done_weight else 0
    moment = StepMoment(
        **rank.throughout,
        working_weights=weights.at_end_bytes,
        done_gradients=gradients.done(layer_weights) + shard_bytes,
        vocabulary_gradients=gradients.element_bytes * whole,
        reduce_scatter=rank.states.reduced_gradient_bytes * buffered + weights.before_cast(reduced),
    )
    if not weights.sums_whole:
        return moment
    return moment._replace(
        earlier_gradients=rank.states.reduced_gradient_bytes * whole,
        done_gradients=weights.shards(layer_weights + reduced),
        vocabulary_gradients=0,
    )


def optimizer(rank: RankMemory) -> StepMoment:
    """The update: all gradients, and float32 copies of its first bucket; under FSDP2 only gradient shards, no copies.

    Without a flush between steps (2bw) activations of micro-batches in flight are there as well.
    """
    count, element_bytes, levers = rank.stage.weights, rank.shape.element_bytes, rank.levers
    shard_bytes = rank.states.kept_gradient_bytes * rank.states.owned
    if levers.update_in_backward:
        return StepMoment(all_gradients=min(rank.gradients.waiting_at_end_bytes, shard_bytes))
    if rank.weights.zero:
        return StepMoment(all_gradients=shard_bytes)
    has_masters = rank.states.resident.masters > 0
    copies_bytes = 0
    if is_torch_adamw(levers, wide=has_masters or element_bytes == FLOAT32_BYTES):
        copies_bytes = _widened_bytes(rank) if has_masters else 0
    elif levers.optimizer_states == "factored":  # the second moment is expanded to full size, a chunk at a time
        copies_bytes = 3 * FLOAT32_BYTES * min(FACTORED_CHUNK_ELEMENTS, count)
    in_flight_bytes = rank.in_flight.other_bytes if rank.layout.has_two_versions else 0
    return StepMoment(
        other_micro_batches=in_flight_bytes, all_gradients=element_bytes * count, update_copies=copies_bytes
    )


def _widened_bytes(rank: RankMemory) -> int:
    """Growth while gradients are copied to float32, a bucket at a time: each copy replaces its gradient, unless that is
    a view of DDP's bucket. The embedding's copy is first and alone; then the largest matrix; then a full bucket."""
    stage = rank.stage
    embedding = stage.vocabulary if stage.span.has_embedding else 0
    freed_bytes = 0 if has_buckets(rank.layout) else rank.shape.element_bytes
    bucket = min(BUCKET_BYTES, FLOAT32_BYTES * stage.weights) // FLOAT32_BYTES
    return max(
        FLOAT32_BYTES * embedding,
        FLOAT32_BYTES * max(stage.last_layer_matrices) - freed_bytes * embedding,
        (FLOAT32_BYTES - freed_bytes) * bucket,
    )


def _cubic_table_bytes(shape: LocalShape) -> int:
    """The embedding on a 3D mesh, all-gathered over depth, as received and as reordered; 0 on other layouts."""
    if not shape.mesh_ranks or shape.mesh_ranks != shape.tensor**3:
        return 0
    return 2 * shape.columns(shape.spec.vocab_size) * shape.columns(shape.spec.hidden_size) * shape.element_bytes
