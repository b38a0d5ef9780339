"""RankMemory: everything that the moments of a step on one pipeline rank are made of."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.state_format import moment_bytes
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.gradients import Gradients, make_gradients
from tightfit.memory.formulas.local_shape import LocalShape, ceil, local_shape
from tightfit.memory.formulas.overheads import DEFAULT, Overheads
from tightfit.memory.formulas.pipeline import forwards_come_first, pieces_in_flight
from tightfit.memory.formulas.saved import INDEX
from tightfit.memory.formulas.segments import unsplit_bytes
from tightfit.memory.formulas.stage import StageMemory, checkpoint_bytes, stage_memory
from tightfit.memory.formulas.states import MASTER, States, resident_states
from tightfit.memory.formulas.story import OnHost, Resident
from tightfit.memory.formulas.teacher import TeacherMemory, teacher_memory
from tightfit.memory.formulas.working_weights import WholeWeights, working_weights
from tightfit.models.spec import ModelSpec


@dataclass(slots=True, kw_only=True)
class RankMemory:
    """One rank: its shapes, and how it holds what."""

    spec: ModelSpec
    layout: Layout
    levers: Levers
    shape: LocalShape
    stage: StageMemory
    states: States
    resident: Resident
    host: OnHost
    gradients: Gradients
    weights: WholeWeights
    """As forward and backward use them."""
    other_micro_batches_bytes: int
    """Activations of the other micro-batches in flight."""
    arriving_bytes: int
    """A checkpoint on its way from the host."""
    teacher: TeacherMemory


def rank_memory(
    workload: Workload, layout: Layout, levers: Levers, rank: int, overheads: Overheads = DEFAULT
) -> RankMemory:
    """Everything about pipeline rank `rank`."""
    spec, shape = workload.spec, local_shape(workload, layout, levers)
    stage = stage_memory(workload, layout, levers, shape, rank)
    micro_batches = max(1, workload.global_batch // (layout.micro_batch * layout.data))
    states = resident_states(
        workload,
        layout,
        levers,
        stage.params,
        layer_weights=stage.layer_weights,
        widest_layer=_streamed_at_once(layout, stage),
    )
    states = states._replace(unsplit=_unsplit_bytes(workload, layout, levers, stage, states))
    flight = _in_flight(layout, stage, micro_batches, states.kept_gradient_bytes * stage.weights)
    weights = working_weights(layout, levers, stage, states, micro_batches, workload.rounding is not None)
    one_checkpoint_bytes = checkpoint_bytes(spec, shape, levers) if stage.offloaded else 0
    teacher = teacher_memory(workload.teacher, spec, shape, levers)
    return RankMemory(
        spec=spec,
        layout=layout,
        levers=levers,
        shape=shape,
        stage=stage,
        states=states,
        resident=Resident(
            weights=states.weights,
            masters=states.masters,
            moments=states.moments,
            unsplit=states.unsplit,
            staging=states.staging,
            inputs=2 * INDEX * shape.tokens,
            cublas=overheads.workspace_bytes,
            teacher=teacher.gpu_weights,
            scales=0 if workload.rounding is None else workload.rounding.scale_bytes(stage.layer_weights),
        ),
        host=OnHost(
            weights=states.host_weights,
            masters=states.host_masters,
            moments=states.host_moments,
            checkpoints=_waiting_checkpoints(layout, stage, micro_batches) * one_checkpoint_bytes
            if stage.offloaded
            else 0,
            teacher=teacher.host_weights,
        ),
        gradients=make_gradients(layout, levers, stage, states, weights, flight.summed),
        weights=weights,
        other_micro_batches_bytes=flight.other_bytes,
        arriving_bytes=one_checkpoint_bytes,
        teacher=teacher,
    )


def _unsplit_bytes(workload: Workload, layout: Layout, levers: Levers, stage: StageMemory, states: States) -> int:
    """Of the weights, masters and moments of every matrix; those on the host are not the allocator's."""
    if levers.offload != "none":
        return 0
    moments_bytes = moment_bytes(levers, wide=workload.updates_wide)
    moments = 1 if levers.optimizer_states == "factored" else 2
    widths = [moments_bytes / moments] * moments
    widths += [MASTER] if states.masters else []
    widths += [states.element_bytes] if states.weights else []
    ranks = states.ranks if layout.zero else 1
    ends = 1 if stage.shares_embedding else stage.stage.has_embedding + stage.stage.has_head
    layers = stage.stage.last - stage.stage.first
    in_layers_bytes = layers * _unsplit_of(stage.last_layer_matrices, tuple(widths), ranks)
    return in_layers_bytes + ends * _unsplit_of((stage.vocabulary,), tuple(widths), ranks)


@lru_cache(maxsize=4096)
def _unsplit_of(matrices: tuple[int, ...], widths: tuple[float, ...], ranks: int) -> int:
    """Of matrices with so many bytes a weight, each a tensor of its own and split over `ranks`."""
    return sum(unsplit_bytes(int(width * matrix) // ranks) for matrix in matrices for width in widths)


def _waiting_checkpoints(layout: Layout, stage: StageMemory, micro_batches: int) -> int:
    """Inputs on the host at once: of the layers of every piece of a pipeline that is in flight, at most."""
    pieces, chunks = max(1, pieces_in_flight(layout, stage.stage.rank, micro_batches)), layout.stages_per_rank
    return pieces * -(-stage.offloaded // chunks)


class InFlight(NamedTuple):
    """A rank's fullest time in a pipeline."""

    other_bytes: int
    """What micro-batches other than the one at work keep."""
    summed: int
    """Of how many micro-batches gradients are summed by its end; with one, there are none from before."""


def _streamed_at_once(layout: Layout, stage: StageMemory) -> int:
    """Weights that pass through one buffer from the host: a layer's or, to be gathered, a group's shard."""
    if not layout.zero:
        return stage.widest
    ranks = layout.data * layout.context // layout.copies
    experts = ceil(stage.widest_group, max(1, ranks // layout.expert)) if layout.expert > 1 else 0
    return max(ceil(stage.widest_dense, ranks), experts)


def _in_flight(layout: Layout, stage: StageMemory, micro_batches: int, gradients_bytes: int) -> InFlight:
    if layout.pipeline == 1:
        return InFlight(0, micro_batches)
    rank, chunks = stage.stage.rank, layout.stages_per_rank
    sent_bytes = 0 if stage.stage.has_head else chunks * stage.stream_bytes
    each_bytes = sum(stage.saved) + stage.outside_bytes + sent_bytes
    loss_bytes = stage.loss.kept if stage.stage.has_head else 0
    pieces = pieces_in_flight(layout, rank, micro_batches)
    other_bytes = each_bytes * max(0, pieces - chunks) // chunks
    if layout.schedule == "zero-bubble" and rank:
        waiting = min(micro_batches, rank + 1)
        other_bytes += waiting * stage.for_weights_bytes + (waiting - 1) * loss_bytes
    elif chunks == 1:  # the last rank has several losses only where all forwards come first
        other_bytes += (pieces - 1) * loss_bytes
    if not forwards_come_first(layout, rank, micro_batches):
        return InFlight(other_bytes, micro_batches)
    # Fullest in the first backward or, if gradients take more than a micro-batch, in the second, when one is gone.
    if each_bytes + loss_bytes >= gradients_bytes or micro_batches == 1:
        return InFlight(other_bytes, 1)
    return InFlight(max(0, other_bytes - each_bytes - loss_bytes), micro_batches)
