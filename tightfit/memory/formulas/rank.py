"""RankMemory: everything that the moments of a step on one pipeline rank are made of."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.precision import FLOAT32_BYTES, INT64_BYTES
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.adapter import frozen_unsplit_bytes
from tightfit.memory.formulas.gradients import Gradients, make_gradients
from tightfit.memory.formulas.local_shape import LocalShape, ceil, local_shape
from tightfit.memory.formulas.loss import LossCost, loss_cost
from tightfit.memory.formulas.overheads import DEFAULT, Overheads
from tightfit.memory.formulas.pipeline import (
    RankSpan,
    forwards_come_first,
    micro_batches_in_flight,
    most_in_flight,
    most_in_turns,
)
from tightfit.memory.formulas.segments import unsplit_bytes
from tightfit.memory.formulas.stage import StageMemory, checkpoint_bytes, stage_memory
from tightfit.memory.formulas.states import States, resident_states
from tightfit.memory.formulas.story import OnHost, Resident
from tightfit.memory.formulas.teacher import TeacherMemory, teacher_memory
from tightfit.memory.formulas.working_weights import WorkingWeights, working_weights


@dataclass(slots=True, kw_only=True)
class RankMemory:
    """One rank: its shapes, and how it holds what."""

    layout: Layout
    levers: Levers
    shape: LocalShape
    stage: StageMemory
    loss: LossCost
    states: States
    gradients: Gradients
    weights: WorkingWeights
    """As forward and backward use them."""
    other_micro_batches_bytes: int
    """Activations of the other micro-batches in flight."""
    beside_embedding_bytes: int
    """The same when backward has reached the embedding, with what the micro-batch keeps in the rank's other stages."""
    arriving_bytes: int
    """A checkpoint on its way from the host."""
    teacher: TeacherMemory
    resident: Resident = field(init=False)
    host: OnHost = field(init=False)
    second_backward: "RankMemory | None" = None
    """The same rank where it may be fuller in its second backward than in its first, which has no earlier gradients."""
    throughout: dict[str, int] = field(init=False)
    """What every moment of forward and backward has, as fields of StepMoment."""
    with_final_norm: dict[str, int] = field(init=False)
    """The same for moments with all layers' activations: the final norm has kept its input."""

    def __post_init__(self) -> None:
        self.throughout = {
            "other_micro_batches": self.other_micro_batches_bytes,
            "outside_layers": self.stage.tables_bytes,
            "earlier_gradients": self.gradients.earlier_bytes,
        }
        self.with_final_norm = {**self.throughout, "outside_layers": self.stage.outside_bytes}


def rank_memory(
    workload: Workload, layout: Layout, levers: Levers, rank: int, overheads: Overheads = DEFAULT
) -> RankMemory:
    """Everything about pipeline rank `rank`, in its first backward and, where that may be fuller, in its second."""
    shape, micro_batches = local_shape(workload, layout, levers), workload.micro_batches(layout)
    stage = stage_memory(workload, layout, levers, shape, rank)
    streamed_at_once = _streamed_at_once(layout, stage)
    states = resident_states(workload, layout, levers, stage.params, stage.layer_params, streamed_at_once)
    loss, teacher = _loss_and_teacher(workload, levers, shape)
    in_flight = _in_flight(layout, stage, loss, micro_batches, shape.stream_bytes)
    weights = working_weights(
        layout, levers, stage, states, micro_batches, overheads.fsdp2, rounds=workload.rounding is not None
    )
    one_checkpoint_bytes = checkpoint_bytes(shape, levers) if stage.offloaded else 0
    memory = RankMemory(
        layout=layout,
        levers=levers,
        shape=shape,
        stage=stage,
        loss=loss,
        states=states,
        gradients=_added_one_by_one(
            weights,
            make_gradients(
                layout,
                levers,
                stage,
                states,
                sums_whole=weights.sums_whole,
                summed_micro_batches=in_flight.summed_micro_batches,
                share_with_sums=in_flight.share_with_sums,
            ),
        ),
        weights=weights,
        other_micro_batches_bytes=in_flight.other_bytes,
        beside_embedding_bytes=in_flight.beside_embedding_bytes,
        arriving_bytes=one_checkpoint_bytes,
        teacher=teacher,
    )
    memory.resident = _resident(memory, workload, overheads)
    checkpoints = _waiting_checkpoints(layout, stage, micro_batches)
    memory.host = states.host._replace(checkpoints=checkpoints * one_checkpoint_bytes, teacher=teacher.host_weights)
    if in_flight.freed_bytes is not None:
        memory.second_backward = _second_backward(memory, in_flight.freed_bytes, micro_batches)
    return memory


def _second_backward(first: RankMemory, freed_bytes: int, micro_batches: int) -> RankMemory | None:
    """With gradients of the first and without activations that are gone; None where these are more."""
    stage, states = first.stage, first.states
    if freed_bytes >= states.reduced_gradient_bytes * stage.weights:
        return None
    gradients = make_gradients(
        first.layout,
        first.levers,
        stage,
        states,
        sums_whole=first.weights.sums_whole,
        summed_micro_batches=micro_batches,
    )
    return replace(
        first,
        gradients=_added_one_by_one(first.weights, gradients),
        other_micro_batches_bytes=max(0, first.other_micro_batches_bytes - freed_bytes),
        beside_embedding_bytes=max(0, first.beside_embedding_bytes - freed_bytes),
    )


def _added_one_by_one(weights: WorkingWeights, gradients: Gradients) -> Gradients:
    """Of `gradients` that FSDP2 adds to whole sums, none waits for the rest of its layer or for the root's."""
    if not (weights.fsdp2.adds_one_by_one and weights.sums_whole and gradients.earlier_bytes):
        return gradients
    return gradients._replace(add_in_place=True, head_bytes=0, sent_head_bytes=0)


def _resident(rank: RankMemory, workload: Workload, overheads: Overheads) -> Resident:
    """What is on the GPU from the first step to the last."""
    states, two_versions = rank.states, rank.layout.has_two_versions
    unsplit = _unsplit_bytes(rank.layout, rank.levers, rank.stage, states)
    return states.resident._replace(
        unsplit=unsplit + (0 if rank.shape.adapted is None else frozen_unsplit_bytes(rank.shape)),
        frozen=frozen_bytes(workload),
        inputs=2 * INT64_BYTES * rank.shape.tokens,
        cublas=overheads.workspace_bytes,
        teacher=rank.teacher.gpu_weights,
        scales=0 if workload.rounding is None else workload.rounding.scale_bytes(rank.stage.layer_weights),
        older_weights=states.resident.weights if two_versions else 0,
        finished_gradients=_finished_gradients(rank) if two_versions else 0,
    )


def frozen_bytes(workload: Workload) -> int:
    """The model under adapters; 0 where that itself is trained."""
    adapted = workload.adapted
    return 0 if adapted is None else adapted.frozen_bytes(workload.spec, workload.weight_bytes)


def _finished_gradients(rank: RankMemory) -> int:
    """Of a step that is over in a pipeline without a flush: they wait for the norm, and where the embedding is tied the
    last stage's copy of it for the first stage's gradients."""
    awaited = rank.stage.vocabulary if rank.shape.spec.tied and rank.stage.span.has_head else 0
    return rank.states.kept_gradient_bytes * (rank.states.owned + awaited)


def _loss_and_teacher(workload: Workload, levers: Levers, shape: LocalShape) -> tuple[LossCost, TeacherMemory]:
    is_bf16 = shape.element_bytes == 2 and workload.precision != "fp16"
    teacher = teacher_memory(workload.teacher, shape, levers, bf16=is_bf16)
    fused = levers.loss == "fused" and workload.engine.passes.logits is None
    chunk_bytes = levers.loss_chunk_bytes
    return loss_cost(shape, fused=fused, allowed_bytes=chunk_bytes, sum_bytes=teacher.sum_bytes), teacher


def _unsplit_bytes(layout: Layout, levers: Levers, stage: StageMemory, states: States) -> int:
    """What the allocator counts with the weights, masters and moments of every matrix beyond their bytes (segments.py);
    those on the host are not the allocator's."""
    widths: list[float] = [states.element_bytes] if states.resident.weights else []
    if not states.host.moments:
        moments = 1 if levers.optimizer_states == "factored" else 2
        widths += [states.moment_bytes / moments] * moments
        widths += [FLOAT32_BYTES] if states.resident.masters else []
    ranks = states.ranks if layout.zero else 1
    ends = 1 if stage.shares_embedding else stage.span.has_embedding + stage.span.has_head
    layers = 0 if states.streams_weights else stage.span.last - stage.span.first
    total_bytes = 0
    for width in widths:
        total_bytes += ends * unsplit_bytes((stage.vocabulary,), width, ranks)
        total_bytes += layers * unsplit_bytes(stage.last_layer_matrices, width, ranks)
    return total_bytes


def _streamed_at_once(layout: Layout, stage: StageMemory) -> int:
    """Weights that pass through one buffer from the host: a layer's or, to be gathered, a group's shard."""
    if not layout.zero:
        return stage.widest
    ranks = layout.sharing
    experts = ceil(stage.widest_group, max(1, ranks // layout.expert)) if layout.expert > 1 else 0
    return max(ceil(stage.widest_dense, ranks), experts)


def _waiting_checkpoints(layout: Layout, stage: StageMemory, micro_batches: int) -> int:
    """Inputs on the host at once: of every micro-batch in flight those of the layers of its stage."""
    if not stage.offloaded:
        return 0
    return most_in_flight(layout, stage.span.rank, micro_batches, stage.offloaded_by_stage)


class InFlight(NamedTuple):
    """A rank's fullest time in a pipeline."""

    other_bytes: int
    """Activations of the micro-batches in flight other than the one at work."""
    beside_embedding_bytes: int
    """The same when that one has reached the embedding."""
    summed_micro_batches: int
    """Of how many micro-batches gradients are summed by the end of that backward; with one, none are there before."""
    share_with_sums: float = 1.0
    """Share of its layers that have gradients of earlier micro-batches by then."""
    freed_bytes: int | None = None
    """Where that is its first backward: activations that are gone once all its layers have gradients."""


def _in_flight(layout: Layout, stage: StageMemory, loss: LossCost, micro_batches: int, stream_bytes: int) -> InFlight:
    if layout.pipeline == 1:
        return InFlight(other_bytes=0, beside_embedding_bytes=0, summed_micro_batches=micro_batches)
    stages = layout.stages_per_rank
    sent_bytes = (stages - stage.span.has_head) * stream_bytes  # what each stage but the model's last sent on
    each_bytes = sum(stage.saved) + stage.outside_bytes + sent_bytes
    loss_bytes = loss.kept if stage.span.has_head else 0
    other_bytes = _other_micro_batches_bytes(layout, stage, micro_batches, each_bytes, loss_bytes)
    beside_embedding_bytes = other_bytes
    if layout.schedule == "interleaved":
        layers = stage.span.layers_by_stage
        most = most_in_turns(layout, stage.span.rank, micro_batches, layers)
        other_bytes = max(0, ceil(each_bytes * most.before_backward, sum(layers)) - each_bytes)
        beside_embedding_bytes = ceil(each_bytes * most.beside_first_stage, sum(layers))
    if micro_batches > 1 and forwards_come_first(layout, stage.span.rank, micro_batches):
        # Interleaved, a rank's first stage begins backward after K backwards of each later one.
        backwards_before = (stages - 1) * layout.pipeline + 1
        freed_bytes = backwards_before * each_bytes // stages + loss_bytes
        return InFlight(other_bytes, beside_embedding_bytes, summed_micro_batches=1, freed_bytes=freed_bytes)
    share = _share_with_sums(layout, stage.span, micro_batches)
    return InFlight(other_bytes, beside_embedding_bytes, micro_batches, share)


def _other_micro_batches_bytes(
    layout: Layout, stage: StageMemory, micro_batches: int, each_bytes: int, loss_bytes: int
) -> int:
    """Of micro-batches that keep `each_bytes` in all stages of a rank, and `loss_bytes` for the loss."""
    rank = stage.span.rank
    in_flight = micro_batches_in_flight(layout, rank, micro_batches)
    other_bytes = max(0, _of_stages(stage, in_flight, each_bytes) - each_bytes)
    if layout.schedule == "zb-v":
        return max(other_bytes, *_later_in_a_v(layout, stage, micro_batches, each_bytes))
    if layout.schedule == "zero-bubble" and rank:
        waiting = min(micro_batches, rank + 1)  # for their backward for weights
        return other_bytes + waiting * stage.for_weights_bytes + (waiting - 1) * loss_bytes
    if layout.stages_per_rank == 1:  # the last rank has several losses only where all forwards come first
        return other_bytes + (sum(in_flight) - 1) * loss_bytes
    return other_bytes


def _share_with_sums(layout: Layout, span: RankSpan, micro_batches: int) -> float:
    """Share of a rank's layers that have sums of gradients when it is fullest: of several stages the last alone, where
    all micro-batches go backward through that before any does through another."""
    first_backwards = 2 * layout.pipeline - 1 - span.rank if layout.in_v else layout.pipeline
    if layout.stages_per_rank == 1 or micro_batches > first_backwards:
        return 1.0
    return span.layers_by_stage[-1] / sum(span.layers_by_stage)


def _of_stages(stage: StageMemory, micro_batches: tuple[int, ...], each_bytes: int) -> int:
    """What so many micro-batches in each stage of a rank keep, if one keeps `each_bytes` in all: by their layers."""
    layers = stage.span.layers_by_stage
    kept_layers = sum(count * own for count, own in zip(micro_batches, layers, strict=True))
    return ceil(each_bytes * kept_layers, sum(layers))


def _later_in_a_v(layout: Layout, stage: StageMemory, micro_batches: int, each_bytes: int) -> Iterator[int]:
    """A V after its loss: one more micro-batch down and one less up, of which one waits for weights; and when forwards
    are over, K down and r up, of which r + 1 and r wait."""
    rank, ranks = stage.span.rank, layout.pipeline
    times = [((ranks, rank), (rank + 1, rank))]
    if not stage.span.has_head:
        times.append(((2 * ranks - rank, rank), (1, 0)))
    for in_flight, waiting in times:
        kept_bytes = _of_stages(stage, _at_most(micro_batches, in_flight), each_bytes)
        waiting_bytes = _of_stages(stage, _at_most(micro_batches, waiting), stage.for_weights_bytes)
        yield max(0, kept_bytes - each_bytes) + waiting_bytes


def _at_most(micro_batches: int, counts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(min(micro_batches, count) for count in counts)
