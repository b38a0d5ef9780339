"""The moments of a step: forward, the loss, backward, the optimizer; and of evaluation, which saves no activations.

Forward fills memory layer by layer and is fullest at its end. In backward activations shrink from the last layer to the
first while gradients of weights grow (gradients.py): it begins at the loss, goes through the layers, under FSDP2 with a
reduce-scatter after each, and ends at the embedding. The update has all gradients and its own temporaries beside them.
"""

from tightfit.jobs.precision import FLOAT32_BYTES, INT64_BYTES
from tightfit.jobs.state_format import is_torch_adamw
from tightfit.levers.policy.updates import BUCKET_BYTES, FACTORED_CHUNK_ELEMENTS
from tightfit.memory.formulas.gradients import Gradients, has_buckets
from tightfit.memory.formulas.in_flight import InFlight, in_flight
from tightfit.memory.formulas.local_shape import LocalShape
from tightfit.memory.formulas.rank import RankMemory
from tightfit.memory.formulas.stage import LayerVisit
from tightfit.memory.formulas.story import StepMoment
from tightfit.memory.formulas.working_weights import WorkingWeights

SMALL_EMBEDDING_TOKENS = 3072
ROWS_PER_PARTIAL = 10
SORTED_INDICES = 4
"""torch's embedding_dense_backward (EmbeddingBackwardKernel.cu): the most tokens for which it needs no workspace, rows
per partial sum, and int64 indices per token while it sorts them."""


def steps(rank: RankMemory) -> list["Step"]:
    """The step around each backward in which `rank` may be fullest; forward, loss and optimizer are the first's."""
    return [Step(rank, flying) for flying in in_flight(rank)]


class Step:
    """The moments of a step on one rank."""

    def __init__(self, rank: RankMemory, flying: InFlight) -> None:
        self.rank, self.shape, self.stage, self.states = rank, rank.shape, rank.stage, rank.states
        self.gradients = Gradients(rank, flying)
        self.weights = WorkingWeights(rank, flying.other_bytes + self.gradients.earlier_bytes)
        self.flying = flying
        others = {"other_micro_batches": flying.other_bytes, "earlier_gradients": self.gradients.earlier_bytes}
        self.throughout = {**others, "outside_layers": rank.stage.tables_bytes}
        self.with_final_norm = {**others, "outside_layers": rank.stage.outside_bytes}
        self.at_embedding = {**self.throughout, "other_micro_batches": flying.beside_embedding_bytes}
        """Fields of StepMoment at every moment of forward and backward; once the final norm has saved its input; and
        when backward has reached the embedding."""

    def forward(self) -> list[StepMoment]:
        """Its end; or its start, with gradients that await offloaded updates, or weights that FSDP2 gathers."""
        end = StepMoment(
            *self.stage.saved,
            **self.with_final_norm,
            at_work=self.stage.forward_extra_bytes,
            working_weights=self.weights.in_forward_bytes,
            all_gather=self.weights.all_gather_bytes,
            teacher=self.rank.teacher.until_loss,
        )
        earlier_bytes, teaching_bytes = self.gradients.earlier_bytes, self.rank.teacher.teaching
        teaching = StepMoment(earlier_gradients=earlier_bytes, teacher=teaching_bytes) if teaching_bytes else None
        # When the embedding is looked up, updates of the step before may be pending, and their gradients exist.
        pending_bytes = max(self.gradients.from_last_step_bytes, earlier_bytes)
        start = StepMoment(**{**self.throughout, "earlier_gradients": pending_bytes})
        table_bytes = _cubic_table_bytes(self.shape) if self.stage.span.has_embedding else 0
        moments = [end, teaching] if teaching else [end]
        moments += [start] if self.rank.resident.staging else []
        moments += [start._replace(at_work=table_bytes)] if table_bytes else []
        moments += [self._last_gathering()] if self.weights.zero else []
        return moments + (self._first_gathering(start) if self.weights.zero == 3 else [])

    def _first_gathering(self, start: StepMoment) -> list[StepMoment]:
        """The root and the group gathered next, beside both all-gather buffers, or since torch 2.15 one at a time."""
        after_root = self.stage.embedding or self.stage.widest
        root_bytes = self.states.element_bytes * self.stage.root
        after_root_bytes = self.states.element_bytes * after_root
        both_bytes = root_bytes + after_root_bytes
        if not self.weights.fsdp2.frees_buffer_before_copy:
            return [start._replace(working_weights=both_bytes, all_gather=both_bytes)]
        gathered = start._replace(working_weights=both_bytes)
        before = gathered._replace(all_gather=root_bytes + self.weights.narrowed(after_root, self.states.ranks))
        return [before, gathered._replace(all_gather=after_root_bytes, stream=self.shape.stream_bytes)]

    def _last_gathering(self) -> StepMoment:
        """The last layer's weights have been gathered; the all-gather buffer of the layer before still exists."""
        return StepMoment(
            *self.stage.visits[0].saved_before,
            **self.throughout,
            stream=self.shape.stream_bytes,
            working_weights=self.weights.in_forward_bytes,
            all_gather=self.weights.gathering_buffers(),
        )

    def loss(self) -> StepMoment:
        """All activations, a chunk of logits, and the gradients that the fused loss computes in forward."""
        cost, teacher = self.rank.loss, self.rank.teacher
        return StepMoment(
            *self.stage.saved,
            **self.with_final_norm,
            working_weights=self.weights.at_loss_bytes,
            all_gather=self.weights.all_gather_bytes,
            logits=teacher.chunk or cost.logits,
            teacher=teacher.until_loss + teacher.at_loss,
            hidden=cost.forward - cost.logits - cost.wide_weight_gradient,
            vocabulary_gradients=cost.wide_weight_gradient,
        )

    def evaluation(self) -> StepMoment:
        """The running layer or the loss; DDP's buckets also exist between steps."""
        evaluated_loss_bytes = self.rank.loss.evaluated if self.stage.span.has_head else 0
        return StepMoment(
            working_weights=self.weights.in_forward_bytes,
            earlier_gradients=self.shape.element_bytes * self.stage.weights if has_buckets(self.rank.layout) else 0,
            stream=self.shape.stream_bytes,
            at_work=max(self.stage.working_bytes, evaluated_loss_bytes),
            all_gather=self.weights.all_gather_bytes,
        )

    def backward(self) -> list[StepMoment]:
        """Moments at which backward may be fullest."""
        span, weights, visits = self.stage.span, self.weights, self.stage.visits
        moments = [self._at_layer(visit) for visit in visits if weights.zero or not visit.is_inner]
        moments += [self._at_loss()] if span.has_head else []
        moments += [self._at_embedding()] if span.has_embedding and self.shape.adapted is None else []
        # ZeRO-1 reduces its whole sums in the last backward of a step, when no other micro-batch is in flight.
        if weights.zero and (self.gradients.earlier_bytes or not weights.sums_whole):
            moments += [self._at_reduction(visit) for visit in visits if not visit.is_inner]
            moments += [self._after_experts(visit) for visit in visits if visit.kind.apart_weights]
            moments += self._at_last_reduction() if self.stage.root else []
        elif weights.zero:
            moments.append(self._at_first_sums())
        return moments

    def _at_loss(self) -> StepMoment:
        """Backward begins: the fused loss's float32 sum is cast to the output projection's gradient."""
        cost, wide_bytes = self.rank.loss, self.rank.loss.wide_weight_gradient
        is_cast = wide_bytes and self.shape.element_bytes < FLOAT32_BYTES and not cost.rounds_in_place
        narrow_bytes = self.shape.element_bytes * self.stage.vocabulary if is_cast else 0
        return StepMoment(
            *self.stage.saved,
            **self.with_final_norm,
            working_weights=self.weights.at_loss_bytes,
            vocabulary_gradients=wide_bytes + narrow_bytes,
            logits=cost.backward - wide_bytes,
            all_gather=self.weights.prefetched(None),
        )

    def _at_layer(self, visit: LayerVisit) -> StepMoment:
        """The fullest moment of a layer."""
        gradients = self.gradients
        moment = visit.kind.fullest_summing if gradients.add_in_place else visit.moment
        done_bytes = gradients.done(visit.done_weights)
        return StepMoment(
            *visit.saved_before,
            **self.throughout,
            working_weights=self.weights.at_layer(visit),
            done_gradients=done_bytes,
            layer_gradients=gradients.of_layer(moment, done_bytes),
            vocabulary_gradients=gradients.head(visit, moment),
            layer_saved=moment.saved_bytes,
            activation_gradients=moment.temporary_bytes,
            kernel_workspace=moment.workspace_bytes,
            all_gather=self.weights.prefetched(visit),
            reduce_scatter=self.weights.previous_reduction(visit),
            arriving=self.rank.arriving_bytes if visit.awaits_input else 0,
        )

    def _at_reduction(self, visit: LayerVisit) -> StepMoment:
        """FSDP2's reduce-scatter after a layer: whole gradients beside the buffer they are reduced from; its weights
        are freed. Where its experts are split, the moment is that of their group, before attention's backward."""
        stage, weights, gradients, kind = self.stage, self.weights, self.gradients, visit.kind
        reduced_weights = kind.apart_weights or kind.weights
        complete_bytes = gradients.element_bytes * (reduced_weights - kind.padding_weights)
        moment = StepMoment(
            *visit.saved_before,
            **self.throughout,
            working_weights=weights.after_layer(visit),
            done_gradients=gradients.done(visit.done_weights),
            layer_gradients=max(complete_bytes, weights.reduced_experts(visit)),
            vocabulary_gradients=gradients.head_bytes,
            layer_saved=kind.reduction_bytes,
            activation_gradients=self.shape.stream_bytes,
            all_gather=weights.prefetched(visit),
            reduce_scatter=self.states.reduced_gradient_bytes * reduced_weights,
        )
        whole = (1 - stage.padding_weights / stage.weights) * (stage.weights - visit.done_weights)
        return self._reducing_sums(moment, whole, visit.done_weights) if weights.sums_whole else moment

    def _after_experts(self, visit: LayerVisit) -> StepMoment:
        """Attention's backward in a layer with split experts, beside the buffer and the shard of their reduction."""
        return self._at_reduction(visit)._replace(
            layer_gradients=self.weights.reduced_experts(visit),
            layer_saved=visit.kind.attention_bytes,
            activation_gradients=0,
        )

    def _at_embedding(self) -> StepMoment:
        """The end of backward: the embedding's gradient, its kernel's sums, and gradients that stay until then."""
        stage, gradients = self.stage, self.gradients
        return StepMoment(
            **self.at_embedding,
            working_weights=self.weights.at_embedding_bytes,
            done_gradients=gradients.done(stage.layer_weights),
            vocabulary_gradients=gradients.head_bytes + gradients.element_bytes * stage.vocabulary,
            activation_gradients=self.shape.stream_bytes + _cubic_table_bytes(self.shape),
            kernel_workspace=_embedding_sums(self.shape),
            reduce_scatter=self.weights.previous_reduction(None),
        )

    def _at_first_sums(self) -> StepMoment:
        """The end of a step's first backward under ZeRO-1: gradients of root and embedding, and a float32 copy of the
        larger one, with which the sum over micro-batches begins."""
        copy_bytes = self.states.reduced_gradient_bytes * max(self.stage.root, self.stage.embedding)
        return StepMoment(
            **self.at_embedding,
            working_weights=self.weights.at_embedding_bytes,
            done_gradients=self.gradients.done(self.stage.layer_weights),
            vocabulary_gradients=self.states.element_bytes * self.stage.outside + copy_bytes,
        )

    def _at_last_reduction(self) -> list[StepMoment]:
        """FSDP2's callback after backward: whole gradients of root and embedding, the buffer that the larger is reduced
        from, and the shard that it is reduced to; since torch 2.15 either those gradients or the shard."""
        outside, largest = self.stage.outside, max(self.stage.root, self.stage.embedding)
        if not self.weights.fsdp2.frees_gradients_before_shard:
            return [self._last_reduction(whole=outside, reduced=largest)]
        before = self._last_reduction(whole=outside, reduced=0)
        return [before, self._last_reduction(whole=outside - largest, reduced=largest)]

    def _last_reduction(self, *, whole: int, reduced: int) -> StepMoment:
        """That buffer, whole gradients of `whole` weights and shards of `reduced`."""
        weights, gradients, stage, layer_weights = self.weights, self.gradients, self.stage, self.stage.layer_weights
        states, stays_gathered = self.states, weights.stays_gathered and not weights.sums_whole
        shard_bytes = weights.shards(reduced) if gradients.bytes_per_done_weight else 0
        is_cast = states.reduced_gradient_bytes > states.kept_gradient_bytes
        uncast_bytes = states.reduced_gradient_bytes * reduced // states.ranks if is_cast else 0
        buffer_bytes = states.reduced_gradient_bytes * max(stage.root, stage.embedding)
        moment = StepMoment(
            **self.throughout,
            working_weights=states.element_bytes * stage.weights if stays_gathered else 0,
            done_gradients=gradients.done(layer_weights) + shard_bytes,
            vocabulary_gradients=gradients.element_bytes * whole,
            reduce_scatter=buffer_bytes + uncast_bytes,
        )
        return self._reducing_sums(moment, whole, layer_weights + reduced) if weights.sums_whole else moment

    def _reducing_sums(self, moment: StepMoment, whole: float, reduced: int) -> StepMoment:
        """`moment` where ZeRO-1 has summed whole gradients: its own are sums of `whole` weights and shards of `reduced`
        weights."""
        return moment._replace(
            earlier_gradients=round(self.states.reduced_gradient_bytes * whole),
            done_gradients=self.weights.shards(reduced),
            layer_gradients=0,
            vocabulary_gradients=0,
        )

    def optimizer(self) -> StepMoment:
        """The update: all gradients, and float32 copies of its first bucket; under FSDP2 only gradient shards; without
        a flush between steps (2bw) also activations of micro-batches in flight."""
        count, element_bytes, levers = self.stage.weights, self.shape.element_bytes, self.rank.levers
        shard_bytes = self.states.kept_gradient_bytes * self.states.owned
        if levers.update_in_backward:
            return StepMoment(all_gradients=min(self.gradients.waiting_at_end_bytes, shard_bytes))
        if self.weights.zero:
            return StepMoment(all_gradients=shard_bytes)
        has_masters = self.states.resident.masters > 0
        copies_bytes = 0
        if is_torch_adamw(levers, wide=has_masters or element_bytes == FLOAT32_BYTES):
            copies_bytes = self._widened_bytes() if has_masters else 0
        elif levers.optimizer_states == "factored":  # the second moment is expanded to full size, a chunk at a time
            copies_bytes = 3 * FLOAT32_BYTES * min(FACTORED_CHUNK_ELEMENTS, count)
        gradients = StepMoment(all_gradients=element_bytes * count, update_copies=copies_bytes)
        has_others = self.rank.layout.has_two_versions
        return gradients._replace(other_micro_batches=self.flying.other_bytes) if has_others else gradients

    def _widened_bytes(self) -> int:
        """Growth while gradients are copied to float32, a bucket at a time: each copy replaces its gradient, unless
        that is a view of DDP's bucket. The embedding's is first and alone, then the largest matrix, then a full bucket.
        """
        stage = self.stage
        embedding = stage.vocabulary if stage.span.has_embedding else 0
        freed_bytes = 0 if has_buckets(self.rank.layout) else self.shape.element_bytes
        bucket = min(BUCKET_BYTES, FLOAT32_BYTES * stage.weights) // FLOAT32_BYTES
        return max(
            FLOAT32_BYTES * embedding,
            FLOAT32_BYTES * max(stage.last_layer_matrices) - freed_bytes * embedding,
            (FLOAT32_BYTES - freed_bytes) * bucket,
        )


def _embedding_sums(shape: LocalShape) -> int:
    """Workspace of the embedding's backward: a float32 row per distinct token and per partial sum, sorted indices."""
    if shape.tokens <= SMALL_EMBEDDING_TOKENS:
        return 0
    rows = min(shape.tokens, shape.spec.vocab_size) + shape.tokens // ROWS_PER_PARTIAL
    return FLOAT32_BYTES * rows * shape.spec.hidden_size + SORTED_INDICES * INT64_BYTES * shape.tokens


def _cubic_table_bytes(shape: LocalShape) -> int:
    """The embedding on a 3D mesh, all-gathered over depth, as received and as reordered; 0 on other layouts."""
    if not shape.is_cube:
        return 0
    return 2 * shape.columns(shape.spec.vocab_size) * shape.columns(shape.spec.hidden_size) * shape.element_bytes
