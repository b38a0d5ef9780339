"""RankMemory: the parts (states, weights, gradients, loss, …) from which step.py adds up a pipeline rank's moments."""

from copy import copy

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.precision import FLOAT32_BYTES, INT64_BYTES
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.adapter import frozen_unsplit_bytes
from tightfit.memory.formulas.gradients import Gradients
from tightfit.memory.formulas.in_flight import InFlight, in_flight
from tightfit.memory.formulas.local_shape import ceil, local_shape
from tightfit.memory.formulas.loss import loss_cost
from tightfit.memory.formulas.overheads import DEFAULT, Overheads
from tightfit.memory.formulas.pipeline import most_in_flight
from tightfit.memory.formulas.segments import unsplit_bytes
from tightfit.memory.formulas.stage import StageMemory, checkpoint_bytes, stage_memory
from tightfit.memory.formulas.states import States
from tightfit.memory.formulas.story import Resident
from tightfit.memory.formulas.teacher import teacher_memory
from tightfit.memory.formulas.working_weights import WorkingWeights


class RankMemory:
    """One rank at the first backward in which it may be fullest."""

    second_backward: "RankMemory | None" = None
    """The same rank in its second backward, which may be fuller: fewer activations, but gradients of the first."""

    def __init__(
        self, workload: Workload, layout: Layout, levers: Levers, number: int, overheads: Overheads = DEFAULT
    ) -> None:
        """Pipeline rank `number`."""
        micro_batches = workload.micro_batches(layout)
        self.layout, self.levers = layout, levers
        self.shape = local_shape(workload, layout, levers)
        self.stage = stage = stage_memory(workload, layout, levers, self.shape, number)
        self.states = States(
            workload, layout, levers, stage.params, stage.layer_params, _streamed_at_once(layout, stage)
        )
        is_bf16 = self.shape.element_bytes == 2 and workload.precision != "fp16"
        self.teacher = teacher_memory(workload.teacher, self.shape, levers, bf16=is_bf16)
        self.loss = loss_cost(
            self.shape,
            fused=levers.loss == "fused" and workload.engine.passes.logits is None,
            allowed_bytes=levers.loss_chunk_bytes,
            sum_bytes=self.teacher.sum_bytes,
        )
        rounds = workload.rounding is not None
        self.weights = WorkingWeights(layout, levers, stage, self.states, micro_batches, overheads.fsdp2, rounds=rounds)
        """Weights in the form that forward and backward use."""
        flying = in_flight(layout, stage, self.loss.kept, micro_batches, self.shape.stream_bytes)
        self._begin_backward(flying)
        self.arriving_bytes = checkpoint_bytes(self.shape, levers) if stage.offloaded else 0
        """A checkpoint on its way from the host."""
        self.resident = self._resident(workload, overheads)
        self.host = self.states.host._replace(teacher=self.teacher.host_weights)
        if stage.offloaded:  # every micro-batch in flight has offloaded inputs in the stages it has passed
            waiting = most_in_flight(layout, stage.span.rank, micro_batches, stage.offloaded_by_stage)
            self.host = self.host._replace(checkpoints=waiting * self.arriving_bytes)
        freed_bytes = flying.freed_bytes
        if freed_bytes is not None and freed_bytes < self.states.reduced_gradient_bytes * stage.weights:
            self.second_backward = copy(self)
            second = InFlight(
                other_bytes=max(0, flying.other_bytes - freed_bytes),
                beside_embedding_bytes=max(0, flying.beside_embedding_bytes - freed_bytes),
                summed_micro_batches=micro_batches,
            )
            self.second_backward._begin_backward(second)

    def _begin_backward(self, flying: InFlight) -> None:
        """Set the attributes that differ between the first and the second backward."""
        self.gradients = Gradients(
            self.layout,
            self.levers,
            self.stage,
            self.states,
            self.weights,
            summed_micro_batches=flying.summed_micro_batches,
            share_with_sums=flying.share_with_sums,
        )
        self.in_flight = flying
        self.throughout = {
            "other_micro_batches": flying.other_bytes,
            "outside_layers": self.stage.tables_bytes,
            "earlier_gradients": self.gradients.earlier_bytes,
        }
        """Fields of StepMoment that are the same at every moment of forward and backward."""
        self.with_final_norm = {**self.throughout, "outside_layers": self.stage.outside_bytes}
        """The same after the last layer's forward: the final norm has saved its input."""
        self.at_embedding = {**self.throughout, "other_micro_batches": flying.beside_embedding_bytes}
        """The same when backward has reached the embedding."""

    def _resident(self, workload: Workload, overheads: Overheads) -> Resident:
        """Bytes on the GPU from the first step to the last."""
        stage, states, two_versions = self.stage, self.states, self.layout.has_two_versions
        unsplit = _unsplit_bytes(self.layout, self.levers, stage, states)
        # Without a flush, gradients of the step before wait for the global norm over all stages; the last stage's copy
        # of a tied embedding also waits for the first stage's gradient.
        awaited = stage.vocabulary if self.shape.spec.tied and stage.span.has_head else 0
        finished_bytes = states.kept_gradient_bytes * (states.owned + awaited)
        return states.resident._replace(
            unsplit=unsplit + (0 if self.shape.adapted is None else frozen_unsplit_bytes(self.shape)),
            frozen=frozen_bytes(workload),
            inputs=2 * INT64_BYTES * self.shape.tokens,
            cublas=overheads.workspace_bytes,
            teacher=self.teacher.gpu_weights,
            scales=0 if workload.rounding is None else workload.rounding.scale_bytes(stage.layer_weights),
            older_weights=states.resident.weights if two_versions else 0,
            finished_gradients=finished_bytes if two_versions else 0,
        )


def frozen_bytes(workload: Workload) -> int:
    """Bytes of the frozen model under adapters; 0 without adapters."""
    adapted = workload.adapted
    return 0 if adapted is None else adapted.frozen_bytes(workload.spec, workload.weight_bytes)


def _unsplit_bytes(layout: Layout, levers: Levers, stage: StageMemory, states: States) -> int:
    """Bytes that the allocator counts beyond the tensors' own (segments.py), for weights, masters and moments of every
    matrix that are on the GPU."""
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
    """Weights copied from the host into one GPU buffer: a layer's or, under FSDP2, the shard of its largest group."""
    if not layout.zero:
        return stage.widest
    ranks = layout.zero_ranks
    experts = ceil(stage.widest_group, max(1, ranks // layout.expert)) if layout.expert > 1 else 0
    return max(ceil(stage.widest_dense, ranks), experts)
