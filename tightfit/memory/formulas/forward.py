"""Forward, the loss, and evaluation: a forward pass that keeps nothing."""

from tightfit.memory.formulas.gradients import has_buckets
from tightfit.memory.formulas.rank import RankMemory
from tightfit.memory.formulas.story import StepMoment
from tightfit.memory.formulas.working_weights import ShardedWeights


def forward(rank: RankMemory) -> list[StepMoment]:
    """Fullest at its end; or at its start, with gradients that wait for the host or weights that FSDP2 gathers."""
    stage, earlier_bytes = rank.stage, rank.gradients.earlier_bytes
    end = StepMoment(
        *stage.saved,
        other_micro_batches=rank.other_micro_batches_bytes,
        outside_layers=stage.outside_bytes,
        at_work=stage.forward_extra_bytes,
        working_weights=rank.weights.in_forward(),
        earlier_gradients=earlier_bytes,
        all_gather=rank.weights.all_gather_buffer(earlier_bytes),
        teacher=rank.teacher.until_loss,
    )
    moments = [end]
    if rank.teacher.teaching:
        moments.append(StepMoment(earlier_gradients=earlier_bytes, teacher=rank.teacher.teaching))
    if rank.resident.staging:
        moments.append(_with_gradients_left(rank))
    if isinstance(rank.weights, ShardedWeights):
        moments.append(_last_gathering(rank, rank.weights))
        if rank.weights.zero == 3:
            moments.append(_first_gathering(rank, rank.weights))
    return moments


def _with_gradients_left(rank: RankMemory) -> StepMoment:
    """Updates of the last step have not been waited for, when the embedding is looked up."""
    return StepMoment(
        other_micro_batches=rank.other_micro_batches_bytes,
        outside_layers=rank.stage.tables_bytes,
        earlier_gradients=max(rank.gradients.left_bytes, rank.gradients.earlier_bytes),
    )


def _first_gathering(rank: RankMemory, weights: ShardedWeights) -> StepMoment:
    """FSDP2 lets go of the root's all-gather buffer only when the first group after it is whole as well."""
    return StepMoment(
        working_weights=weights.first_groups(),
        earlier_gradients=max(rank.gradients.left_bytes, rank.gradients.earlier_bytes),
        other_micro_batches=rank.other_micro_batches_bytes,
        outside_layers=rank.stage.tables_bytes,
        all_gather=weights.first_groups(),
    )


def _last_gathering(rank: RankMemory, weights: ShardedWeights) -> StepMoment:
    """Before the last layer runs, its weights have been gathered; the buffer of the layer before is still there."""
    earlier_bytes = rank.gradients.earlier_bytes
    return StepMoment(
        *rank.stage.visits[0].saved_before,
        stream=rank.stage.stream_bytes,
        working_weights=weights.in_forward(),
        earlier_gradients=earlier_bytes,
        other_micro_batches=rank.other_micro_batches_bytes,
        outside_layers=rank.stage.tables_bytes,
        all_gather=weights.gathering_buffers(earlier_bytes),
    )


def loss(rank: RankMemory) -> StepMoment:
    """Beside all activations a chunk of logits, and the gradients that the fused loss makes at once."""
    stage, cost = rank.stage, rank.loss
    return StepMoment(
        *stage.saved,
        working_weights=rank.weights.at_loss(),
        earlier_gradients=rank.gradients.earlier_bytes,
        other_micro_batches=rank.other_micro_batches_bytes,
        outside_layers=stage.outside_bytes,
        all_gather=rank.weights.all_gather_buffer(rank.gradients.earlier_bytes),
        logits=rank.teacher.chunk or cost.logits,
        teacher=rank.teacher.until_loss + rank.teacher.at_loss,
        hidden=cost.forward - cost.logits - cost.wide_weight_gradient,
        vocabulary_gradients=cost.wide_weight_gradient,
    )


def evaluation(rank: RankMemory) -> StepMoment:
    """The layer at work or the loss; DDP's buckets stay between steps."""
    stage, buckets = rank.stage, has_buckets(rank.layout)
    evaluated_loss_bytes = rank.loss.evaluated if stage.stage.has_head else 0
    return StepMoment(
        working_weights=rank.weights.in_forward(),
        earlier_gradients=rank.shape.element_bytes * stage.weights if buckets else 0,
        stream=stage.stream_bytes,
        at_work=max(stage.working_bytes, evaluated_loss_bytes),
        all_gather=rank.weights.all_gather_buffer(rank.gradients.earlier_bytes),
    )
