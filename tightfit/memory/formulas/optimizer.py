"""The optimizer's step: all gradients, and what updating makes beside them."""

from tightfit.jobs.state_format import is_torch_adamw
from tightfit.levers.policy.updates import BUCKET_BYTES, FACTORED_CHUNK_ELEMENTS
from tightfit.memory.formulas.gradients import has_buckets
from tightfit.memory.formulas.rank import RankMemory
from tightfit.memory.formulas.story import StepMoment
from tightfit.memory.formulas.working_weights import ShardedWeights

WIDE = 4


def optimizer(rank: RankMemory) -> StepMoment:
    """All gradients, and what updating makes; without a flush between steps, micro-batches are in flight meanwhile."""
    moment = _update(rank)
    if rank.layout.has_two_versions:
        return moment._replace(other_micro_batches=rank.other_micro_batches_bytes)
    return moment


def _update(rank: RankMemory) -> StepMoment:
    """The first bucket is widened while all gradients are there; under FSDP2 nothing is, and only shards are left."""
    count, element_bytes = rank.stage.weights, rank.shape.element_bytes
    if rank.levers.update_in_backward:
        all_bytes = rank.states.kept_gradient_bytes * rank.states.owned
        return StepMoment(all_gradients=min(rank.gradients.waiting_at_end_bytes, all_bytes))
    if isinstance(rank.weights, ShardedWeights):
        return StepMoment(all_gradients=rank.states.kept_gradient_bytes * rank.states.owned)
    updates_wide = rank.states.masters > 0 or element_bytes == WIDE
    if not is_torch_adamw(rank.levers, wide=updates_wide):
        return StepMoment(all_gradients=element_bytes * count, update_copies=_factored_bytes(rank, count))
    widened_bytes = _widened_bytes(rank, count) if rank.states.masters else 0
    return StepMoment(all_gradients=element_bytes * count, update_copies=widened_bytes)


def _factored_bytes(rank: RankMemory, count: int) -> int:
    """Our kernels update where things lie; a factored second moment is spread out again a chunk at a time."""
    return 3 * WIDE * min(FACTORED_CHUNK_ELEMENTS, count) if rank.levers.optimizer_states == "factored" else 0


def _widened_bytes(rank: RankMemory, count: int) -> int:
    """Float32 copies less the gradients they replace, which DDP's buckets keep: the embedding's first, alone."""
    stage = rank.stage.stage
    embedding = rank.stage.vocabulary if stage.has_embedding else 0
    largest_matrix = max(rank.stage.last_layer_matrices)
    freed_bytes = 0 if has_buckets(rank.layout) else rank.shape.element_bytes
    bucket = min(BUCKET_BYTES, WIDE * count) // WIDE
    return max(
        WIDE * embedding,
        WIDE * largest_matrix - freed_bytes * embedding,
        WIDE * bucket - freed_bytes * bucket,
    )
