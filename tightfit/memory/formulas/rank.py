"""RankMemory: everything that the moments of a step on one pipeline rank are made of."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.state_format import moment_bytes
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.gradients import Gradients, make_gradients
from tightfit.memory.formulas.local_shape import LocalShape, ceil, local_shape
from tightfit.memory.formulas.loss import LossCost, loss_cost, with_narrow_sums
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
    loss: LossCost
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
    second_backward: "RankMemory | None" = None
    """The same rank where it may be fuller in its second backward than in its first, which has no earlier gradients."""


def rank_memory(
    workload: Workload, layout: Layout, levers: Levers, rank: int, overheads: Overheads = DEFAULT
) -> RankMemory:
    """Everything about pipeline rank `rank`, in its first backward and, where that may be fuller, in its second."""
    made, gone_bytes, micro_batches = _rank_at_first(workload, layout, levers, rank, overheads)
    if gone_bytes is not None and gone_bytes < made.states.reduced_gradient_bytes * made.stage.weights:
        made.second_backward = replace(
            made,
            gradients=make_gradients(layout, levers, made.stage, made.states, made.weights, micro_batches),
            other_micro_batches_bytes=max(0, made.other_micro_batches_bytes - gone_bytes),
        )
    return made


def _rank_at_first(
    workload: Workload, layout: Layout, levers: Levers, rank: int, overheads: Overheads
) -> tuple[RankMemory, int | None, int]:
    """The rank at its fullest or in its first backward, what is gone by the second, and its micro-batches."""
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
    loss, teacher = _loss_and_teacher(workload, levers, shape)
    flight = _in_flight(layout, stage, loss, micro_batches)
    weights = working_weights(layout, levers, stage, states, micro_batches, workload.rounding is not None)
    one_checkpoint_bytes = checkpoint_bytes(spec, shape, levers) if stage.offloaded else 0
    made = RankMemory(
        spec=spec,
        layout=layout,
        levers=levers,
        shape=shape,
        stage=stage,
        loss=loss,
        states=states,
        resident=_resident(workload, layout.has_two_versions, stage, states, shape, teacher, overheads),
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
    return made, flight.gone_bytes, micro_batches


def _resident(
    workload: Workload,
    two_versions: bool,
    stage: StageMemory,
    states: States,
    shape: LocalShape,
    teacher: TeacherMemory,
    overheads: Overheads,
) -> Resident:
    """What is on the GPU from the first step to the last."""
    return Resident(
        weights=states.weights,
        masters=states.masters,
        moments=states.moments,
        unsplit=states.unsplit,
        staging=states.staging,
        inputs=2 * INDEX * shape.tokens,
        cublas=overheads.workspace_bytes,
        teacher=teacher.gpu_weights,
        scales=0 if workload.rounding is None else workload.rounding.scale_bytes(stage.layer_weights),
        older_weights=states.weights if two_versions else 0,
        finished_gradients=_finished_gradient_bytes(workload, stage, states) if two_versions else 0,
    )


def _finished_gradient_bytes(workload: Workload, stage: StageMemory, states: States) -> int:
    """Of the step before, while the next one's grow; the last stage of a tied model awaits the first one's beside."""
    received = stage.vocabulary if workload.spec.tied and stage.stage.has_head else 0
    return states.kept_gradient_bytes * (states.owned + received)


def _loss_and_teacher(workload: Workload, levers: Levers, shape: LocalShape) -> tuple[LossCost, TeacherMemory]:
    fused = levers.loss == "fused" and workload.engine.passes.logits is None
    cost = loss_cost(workload.spec, shape, fused=fused, allowed_bytes=levers.loss_chunk_bytes)
    is_bf16 = shape.element_bytes == 2 and workload.precision != "fp16"
    teacher = teacher_memory(workload.teacher, workload.spec, shape, levers, is_bf16=is_bf16)
    return (with_narrow_sums(cost) if teacher.sums_are_narrow else cost), teacher


def _unsplit_bytes(workload: Workload, layout: Layout, levers: Levers, stage: StageMemory, states: States) -> int:
    """Of the weights, masters and moments of every matrix; those on the host are not the allocator's."""
    widths: list[float] = [states.element_bytes] if states.weights else []
    if not states.host_moments:
        moments = 1 if levers.optimizer_states == "factored" else 2
        widths += [moment_bytes(levers, wide=workload.updates_wide) / moments] * moments
        widths += [MASTER] if states.masters else []
    ranks = states.ranks if layout.zero else 1
    ends = 1 if stage.shares_embedding else stage.stage.has_embedding + stage.stage.has_head
    layers = 0 if states.streams_weights else stage.stage.last - stage.stage.first
    left_bytes = 0
    for width in widths:
        left_bytes += ends * unsplit_bytes((stage.vocabulary,), width, ranks)
        left_bytes += layers * unsplit_bytes(stage.last_layer_matrices, width, ranks)
    return left_bytes


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
    gone_bytes: int | None = None
    """Where that is its first backward: how much less is kept once gradients of all its layers are there."""


def _streamed_at_once(layout: Layout, stage: StageMemory) -> int:
    """Weights that pass through one buffer from the host: a layer's or, to be gathered, a group's shard."""
    if not layout.zero:
        return stage.widest
    ranks = layout.sharing
    experts = ceil(stage.widest_group, max(1, ranks // layout.expert)) if layout.expert > 1 else 0
    return max(ceil(stage.widest_dense, ranks), experts)


def _in_flight(layout: Layout, stage: StageMemory, loss: LossCost, micro_batches: int) -> InFlight:
    if layout.pipeline == 1:
        return InFlight(0, micro_batches)
    rank, chunks = stage.stage.rank, layout.stages_per_rank
    sent_bytes = (chunks - stage.stage.has_head) * stage.stream_bytes
    each_bytes = sum(stage.saved) + stage.outside_bytes + sent_bytes
    loss_bytes = loss.kept if stage.stage.has_head else 0
    pieces = pieces_in_flight(layout, rank, micro_batches)
    other_bytes = each_bytes * max(0, pieces - chunks) // chunks
    if layout.schedule == "zb-v":
        other_bytes = _waiting_in_a_v(layout, stage, micro_batches, each_bytes, other_bytes)
    elif layout.schedule == "zero-bubble" and rank:
        waiting = min(micro_batches, rank + 1)
        other_bytes += waiting * stage.for_weights_bytes + (waiting - 1) * loss_bytes
    elif chunks == 1:  # the last rank has several losses only where all forwards come first
        other_bytes += (pieces - 1) * loss_bytes
    if micro_batches == 1 or not forwards_come_first(layout, rank, micro_batches):
        return InFlight(other_bytes, micro_batches)
    # Interleaved, a rank's first piece begins after K backwards of each later one.
    gone_pieces = (chunks - 1) * layout.pipeline + 1
    return InFlight(other_bytes, 1, gone_pieces * each_bytes // chunks + loss_bytes)


def _waiting_in_a_v(layout: Layout, stage: StageMemory, micro_batches: int, each_bytes: int, steady_bytes: int) -> int:
    """While forwards last, all pieces in flight; at the end K + r of them, of which 2 r + 1 wait for weights."""
    rank, ranks = stage.stage.rank, layout.pipeline
    left, waiting = min(2 * micro_batches, ranks + rank), min(2 * micro_batches, 2 * rank + 1)
    ending_bytes = (max(0, left - 2) * each_bytes + waiting * stage.for_weights_bytes) // 2
    return max(steady_bytes, ending_bytes)
