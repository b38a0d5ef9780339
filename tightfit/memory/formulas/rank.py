"""RankMemory: what one pipeline rank holds: its part of the model, states, loss and teacher. step.py tells its step."""

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.precision import FLOAT32_BYTES, INT64_BYTES
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.adapter import frozen_bytes, frozen_unsplit_bytes
from tightfit.memory.formulas.local_shape import ceil, local_shape
from tightfit.memory.formulas.loss import loss_cost
from tightfit.memory.formulas.overheads import DEFAULT, Overheads
from tightfit.memory.formulas.pipeline import most_in_flight
from tightfit.memory.formulas.segments import unsplit_bytes
from tightfit.memory.formulas.stage import checkpoint_bytes, stage_memory
from tightfit.memory.formulas.states import States
from tightfit.memory.formulas.story import OnHost, Resident
from tightfit.memory.formulas.teacher import teacher_memory


class RankMemory:
    """Pipeline rank `number`, with all that the moments of its step are computed from."""

    def __init__(
        self, workload: Workload, layout: Layout, levers: Levers, number: int, overheads: Overheads = DEFAULT
    ) -> None:
        self.workload, self.layout, self.levers, self.overheads = workload, layout, levers, overheads
        self.micro_batches = workload.micro_batches(layout)
        self.shape = local_shape(workload, layout, levers)
        self.stage = stage = stage_memory(workload, layout, levers, self.shape, number)
        self.states = States(workload, layout, levers, stage.params, stage.layer_params, self._streamed_at_once())
        is_bf16 = self.shape.element_bytes == 2 and workload.precision != "fp16"
        self.teacher = teacher_memory(workload.teacher, self.shape, levers, bf16=is_bf16)
        self.loss = loss_cost(
            self.shape,
            fused=levers.loss == "fused" and workload.engine.passes.logits is None,
            allowed_bytes=levers.loss_chunk_bytes,
            sum_bytes=self.teacher.sum_bytes,
        )
        self.sums_whole = layout.zero == 1 and self.micro_batches > 1
        """Whether whole gradients are summed over micro-batches and reduce-scattered in the last backward."""
        self.arriving_bytes = checkpoint_bytes(self.shape, levers) if stage.offloaded else 0
        """A checkpoint on its way from the host."""
        self.resident, self.host = self._resident(), self._host()

    def _host(self) -> OnHost:
        """Bytes in host memory; every micro-batch in flight has offloaded inputs in the stages that it has passed."""
        stage, waiting = self.stage, 0
        if stage.offloaded:
            waiting = most_in_flight(self.layout, stage.span.rank, self.micro_batches, stage.offloaded_by_stage)
        checkpoints_bytes = waiting * self.arriving_bytes
        return self.states.host._replace(teacher=self.teacher.host_weights, checkpoints=checkpoints_bytes)

    def _resident(self) -> Resident:
        """Bytes on the GPU from the first step to the last."""
        stage, states, rounding = self.stage, self.states, self.workload.rounding
        two_versions = self.layout.has_two_versions
        # Without a flush, gradients of the step before wait for the global norm over all stages; the last stage's copy
        # of a tied embedding also waits for the first stage's gradient.
        awaited = stage.vocabulary if self.shape.spec.tied and stage.span.has_head else 0
        finished_bytes = states.kept_gradient_bytes * (states.owned + awaited)
        return states.resident._replace(
            unsplit=self._unsplit_bytes() + frozen_unsplit_bytes(self.shape),
            frozen=frozen_bytes(self.workload),
            inputs=2 * INT64_BYTES * self.shape.tokens,
            cublas=self.overheads.workspace_bytes,
            teacher=self.teacher.gpu_weights,
            scales=0 if rounding is None else rounding.scale_bytes(stage.layer_weights),
            older_weights=states.resident.weights if two_versions else 0,
            finished_gradients=finished_bytes if two_versions else 0,
        )

    def _unsplit_bytes(self) -> int:
        """What the allocator counts beyond the tensors of weights, masters and moments on the GPU (segments.py)."""
        stage, states = self.stage, self.states
        widths: list[float] = [states.element_bytes] if states.resident.weights else []
        if not states.host.moments:
            moments = 1 if self.levers.optimizer_states == "factored" else 2
            widths += [states.moment_bytes / moments] * moments
            widths += [FLOAT32_BYTES] if states.resident.masters else []
        ranks = states.ranks if self.layout.zero else 1
        ends = 1 if stage.shares_embedding else stage.span.has_embedding + stage.span.has_head
        layers = 0 if states.streams_weights else stage.span.last - stage.span.first
        total_bytes = 0
        for width in widths:
            total_bytes += ends * unsplit_bytes((stage.vocabulary,), width, ranks)
            total_bytes += layers * unsplit_bytes(stage.last_layer_matrices, width, ranks)
        return total_bytes

    def _streamed_at_once(self) -> int:
        """Weights copied from the host into one buffer: a layer's or, under FSDP2, the shard of its largest group."""
        if not self.layout.zero:
            return self.stage.widest
        ranks, expert = self.layout.zero_ranks, self.layout.expert
        experts = ceil(self.stage.widest_group, max(1, ranks // expert)) if expert > 1 else 0
        return max(ceil(self.stage.widest_dense, ranks), experts)
