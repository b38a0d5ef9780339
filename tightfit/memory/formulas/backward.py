"""Backward: activations shrink from the last layer to the first while gradients of weights grow (gradients.py).

It begins at the loss, goes through the layers, under FSDP2 with a reduction after each, and ends at the embedding.
"""

from tightfit.memory.formulas.rank import RankMemory
from tightfit.memory.formulas.stage import LayerVisit
from tightfit.memory.formulas.story import StepMoment
from tightfit.memory.formulas.working_weights import ShardedWeights

SMALL_EMBEDDING_TOKENS = 3072
ROWS_PER_PARTIAL = 10
WIDE, INDEX = 4, 8


def backward(rank: RankMemory) -> list[StepMoment]:
    """The moments at which it may be fullest."""
    stage, sharded = rank.stage.stage, rank.weights if isinstance(rank.weights, ShardedWeights) else None
    visits = rank.stage.visits
    moments = [_at_layer(rank, visit) for visit in visits if sharded is not None or not visit.is_inner]
    if stage.has_head:
        moments.append(_at_loss(rank))
    if stage.has_embedding:
        moments.append(_at_embedding(rank))
    # Whole sums are reduced in the last backward of a step, whose other micro-batches are gone.
    if sharded is not None and (rank.gradients.earlier_bytes or not sharded.sums_whole):
        moments += [_at_reduction(rank, sharded, visit) for visit in visits if not visit.is_inner]
        moments += [_after_experts(rank, sharded, visit) for visit in visits if visit.apart_weights]
        if rank.stage.root:
            moments.append(_at_last_reduction(rank, sharded))
    elif sharded is not None:
        moments.append(_at_first_sums(rank, sharded))
    return moments + ([] if rank.second_backward is None else backward(rank.second_backward))


def _at_loss(rank: RankMemory) -> StepMoment:
    """The fused loss's float32 sums become the output projection's gradient."""
    stage, cost, element_bytes = rank.stage, rank.loss, rank.shape.element_bytes
    wide_bytes = cost.wide_weight_gradient
    is_cast = wide_bytes and element_bytes < WIDE and not cost.rounds_in_place
    narrow_bytes = element_bytes * stage.vocabulary if is_cast else 0
    return StepMoment(
        *stage.saved,
        working_weights=rank.weights.at_loss(),
        earlier_gradients=rank.gradients.earlier_bytes,
        vocabulary_gradients=wide_bytes + narrow_bytes,
        other_micro_batches=rank.other_micro_batches_bytes,
        outside_layers=stage.outside_bytes,
        logits=cost.backward - wide_bytes,
        all_gather=rank.weights.prefetched(None),
    )


def _at_layer(rank: RankMemory, visit: LayerVisit) -> StepMoment:
    """The fullest moment of a layer."""
    gradients = rank.gradients
    moment = visit.summing if gradients.add_in_place else visit.growing
    done_bytes = gradients.done(visit.done_weights)
    return StepMoment(
        *visit.saved_before,
        working_weights=rank.weights.at_layer(visit),
        earlier_gradients=gradients.earlier_bytes,
        done_gradients=done_bytes,
        layer_gradients=gradients.at_work(moment, done_bytes),
        vocabulary_gradients=gradients.head(visit, moment) if gradients.limit_bytes else gradients.head_bytes,
        other_micro_batches=rank.other_micro_batches_bytes,
        outside_layers=rank.stage.tables_bytes,
        layer_saved=moment.saved_bytes,
        activation_gradients=moment.gradient_bytes,
        kernel_workspace=moment.workspace_bytes,
        all_gather=rank.weights.prefetched(visit),
        reduce_scatter=rank.weights.previous_reduction(visit),
        arriving=rank.arriving_bytes if visit.awaits_input else 0,
    )


def _at_reduction(rank: RankMemory, weights: ShardedWeights, visit: LayerVisit) -> StepMoment:
    """A layer is done: its whole gradients beside the buffer they are reduced from; its own weights are gone.

    Where its experts are a group apart, those are done.
    """
    reduced_weights = visit.apart_weights or visit.own_weights
    made_bytes = rank.gradients.element_bytes * (reduced_weights - visit.padding_weights)
    moment = StepMoment(
        *visit.saved_before,
        working_weights=weights.after_layer(visit),
        earlier_gradients=rank.gradients.earlier_bytes,
        done_gradients=rank.gradients.done(visit.done_weights),
        layer_gradients=max(made_bytes, weights.reduced_experts(visit)),
        vocabulary_gradients=rank.gradients.head_bytes,
        other_micro_batches=rank.other_micro_batches_bytes,
        outside_layers=rank.stage.tables_bytes,
        layer_saved=visit.kept_at_reduction,
        activation_gradients=rank.stage.stream_bytes,
        all_gather=weights.prefetched(visit),
        reduce_scatter=weights.reduced_bytes * reduced_weights,
    )
    if not weights.sums_whole:
        return moment
    unpadded_share = 1 - rank.stage.padding_weights / rank.stage.weights
    return moment._replace(
        earlier_gradients=round(weights.reduced_bytes * unpadded_share * (rank.stage.weights - visit.done_weights)),
        done_gradients=weights.shards(visit.done_weights),
        layer_gradients=0,
        vocabulary_gradients=0,
    )


def _after_experts(rank: RankMemory, weights: ShardedWeights, visit: LayerVisit) -> StepMoment:
    """Attention, where a layer's experts are a group apart: beside what their gradients were reduced from and to."""
    return _at_reduction(rank, weights, visit)._replace(
        layer_gradients=weights.reduced_experts(visit),
        layer_saved=visit.attention_after,
        activation_gradients=0,
    )


def _at_embedding(rank: RankMemory) -> StepMoment:
    """Everything else is done: the embedding's gradient, its kernel's sums, and what has waited for the end."""
    stage, gradients = rank.stage, rank.gradients
    return StepMoment(
        working_weights=rank.weights.at_embedding(),
        earlier_gradients=gradients.earlier_bytes,
        done_gradients=gradients.done(stage.layer_weights),
        vocabulary_gradients=gradients.head_bytes + gradients.element_bytes * stage.vocabulary,
        other_micro_batches=rank.other_micro_batches_bytes,
        outside_layers=stage.tables_bytes,
        activation_gradients=stage.stream_bytes,
        kernel_workspace=_embedding_sums(rank),
        reduce_scatter=rank.weights.previous_reduction(None),
    )


def _embedding_sums(rank: RankMemory) -> int:
    """Torch's embedding_dense_backward, for more than 3072 tokens, holds a float32 row per token and tenth token
    (EmbeddingBackwardKernel.cu) and sorts the indices (four int64 each)."""
    tokens = rank.shape.tokens
    if tokens <= SMALL_EMBEDDING_TOKENS:
        return 0
    rows = min(tokens, rank.spec.vocab_size) + tokens // ROWS_PER_PARTIAL
    return WIDE * rows * rank.spec.hidden_size + 4 * INDEX * tokens


def _at_first_sums(rank: RankMemory, weights: ShardedWeights) -> StepMoment:
    """A step's first backward ends under ZeRO-1: root's and embedding's gradients, the larger widened to be summed."""
    stage, gradients = rank.stage, rank.gradients
    whole, largest = stage.root + stage.embedding, max(stage.root, stage.embedding)
    return StepMoment(
        working_weights=weights.at_embedding(),
        done_gradients=gradients.done(stage.layer_weights),
        vocabulary_gradients=gradients.element_bytes * whole + weights.reduced_bytes * largest,
        other_micro_batches=rank.other_micro_batches_bytes,
        outside_layers=stage.tables_bytes,
    )


def _at_last_reduction(rank: RankMemory, weights: ShardedWeights) -> StepMoment:
    """FSDP2's last callback: the root's and the embedding's whole gradients, and the buffer one is reduced from."""
    stage, gradients = rank.stage, rank.gradients
    whole, largest = stage.root + stage.embedding, max(stage.root, stage.embedding)
    largest_bytes = weights.shards(largest) if gradients.bytes_per_done_weight else 0
    moment = StepMoment(
        working_weights=weights.at_end(),
        earlier_gradients=gradients.earlier_bytes,
        done_gradients=gradients.done(stage.layer_weights) + largest_bytes,
        vocabulary_gradients=gradients.element_bytes * whole,
        other_micro_batches=rank.other_micro_batches_bytes,
        outside_layers=stage.tables_bytes,
        reduce_scatter=weights.reduced_bytes * largest + weights.before_cast(largest),
    )
    if not weights.sums_whole:
        return moment
    return moment._replace(
        earlier_gradients=weights.reduced_bytes * whole,
        done_gradients=weights.shards(stage.layer_weights + largest),
        vocabulary_gradients=0,
    )
