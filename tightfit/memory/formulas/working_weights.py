"""Working weights: copies of the resident weights that forward and backward compute with, and their buffers.

One GPU, DDP and pipelines without ZeRO compute with the resident weights. With fp8 products, each layer's codes
(levers/fp8.py: the weight and its transpose) exist from forward until the layer's backward is done. So do the rounded
copies of quantization-aware training (levers/fake_quantize.py); where layers are recomputed, only the running layer's.

FSDP2 (parallel/data.py) all-gathers 16-bit weights from the shards, in groups: each layer, an untied embedding, and the
root (final norm, output projection, tied embedding, learned positions), which stays whole from forward to backward.
Experts that are split over expert ranks are a group apart from their layer's, gathered and reduced inside it.

- ZeRO-3: the root and the layer at work are whole, and the next layer's weights are being gathered (prefetched).
- ZeRO-1 and 2: layers stay whole after forward too; they are resharded one by one in backward or, with several
  micro-batches, at the end of the last backward.
- An all-gather buffer stays until the next group is copied out of its own buffer; since torch 2.15 it is freed just
  before that copy.
- The reduce-scatter buffer of a layer's gradients (float32 with masters) stays until the next layer is reduced.
- ZeRO-1 with several micro-batches sums whole gradients, which are reduced only in the last backward.
"""

from tightfit.memory.formulas.rank import RankMemory
from tightfit.memory.formulas.stage import LayerVisit

CODE_BYTES = 2
"""Two fp8 codes a weight."""


class WorkingWeights:
    """Bytes of working weights and of FSDP2's buffers at the moments of a step; without ZeRO, only of copies."""

    def __init__(self, rank: RankMemory, other_bytes: int) -> None:
        """`other_bytes`: of other micro-batches, what is kept of them in flight and their sums of gradients."""
        self.stage, self.states, self.fsdp2 = rank.stage, rank.states, rank.overheads.fsdp2
        self.zero, self.sums_whole = rank.layout.zero, rank.sums_whole
        rounds, has_codes = rank.workload.rounding is not None, not self.zero and rank.levers.matmul != "native"
        self.copy_bytes = CODE_BYTES if has_codes else self.states.element_bytes if rounds else 0
        """Bytes per layer weight of its copy for products, beside the weight itself: fp8 codes, or a rounded copy."""
        self.copies_return = rounds and rank.levers.checkpoint_every == 1
        """Whether copies are made again in recomputation, so that only the running layer's exist."""
        self.expert_ranks = max(1, self.states.ranks // rank.layout.expert)
        """Ranks over which ZeRO shards one expert's weights."""
        self.widest_buffered = self.stage.widest_dense if self.expert_ranks == 1 else self.stage.widest_group
        """Weights of the largest group that needs an all-gather buffer: experts on one rank alone need none."""
        self.stays_gathered = self.zero in (1, 2) and rank.micro_batches > 1
        """Under ZeRO-1 and 2 weights stay whole from one micro-batch to the next."""
        # Where they do, only the first micro-batch gathers, and it has nothing of others beside it.
        absent_bytes = other_bytes if self.stays_gathered else 0
        buffer_bytes = self.states.element_bytes * self.widest_buffered
        self.all_gather_bytes = max(0, buffer_bytes - absent_bytes) if self.zero else 0
        """FSDP2's all-gather buffer in forward."""

        layers, widest = self.stage.layer_weights, self.stage.widest
        self.in_forward_bytes = self._held(copied=widest if self.copies_return else layers, at_work=widest)
        self.at_loss_bytes = self._held(copied=0 if self.copies_return else layers)
        """Working weights while the last layer runs forward, and after it."""
        freed = 0 if self.stays_gathered else layers + self.stage.embedding
        self.at_embedding_bytes = self._held(copied=0, freed=freed)
        """When all layers' backward is done."""

    def _held(self, *, copied: int, at_work: int = 0, freed: int = 0) -> int:
        """Copies of `copied` weights; gathered under ZeRO-3 the root and `at_work`, under 1 and 2 all but `freed`."""
        gathered = self.stage.root + at_work if self.zero == 3 else self.stage.weights - freed
        return self.copy_bytes * copied + (self.states.element_bytes * gathered if self.zero else 0)

    def at_layer(self, visit: LayerVisit) -> int:
        """While backward is at work in a layer."""
        copied = self.stage.widest if self.copies_return else self.stage.layer_weights - visit.done_weights
        freed = 0 if self.stays_gathered else visit.done_weights
        return self._held(copied=copied, at_work=visit.kind.weights, freed=freed)

    def after_layer(self, visit: LayerVisit) -> int:
        """Once a layer (or its split experts) has been resharded after its backward."""
        own = visit.kind.apart_weights or visit.kind.weights
        done = visit.done_weights + own
        copied = 0 if self.copies_return else self.stage.layer_weights - done
        freed = 0 if self.stays_gathered and not self.sums_whole else done
        return self._held(copied=copied, at_work=visit.kind.weights - own, freed=freed)

    def gathering_buffers(self) -> int:
        """All-gather buffers around the copy-out of a group: its own, and that of the group before.

        Where the latter is freed before the copy, the peak is just before that: the group then exists only as its own
        buffer (counted as its weights), beside the buffer before and the shard cast to 16 bits.
        """
        if not self.all_gather_bytes:
            return 0
        before_bytes = self.states.element_bytes * self.stage.widest_dense
        if not self.fsdp2.frees_buffer_before_copy:
            return self.all_gather_bytes + before_bytes
        ranks = self.states.ranks if self.expert_ranks == 1 else self.expert_ranks
        return before_bytes + self.narrowed(self.widest_buffered, ranks)

    def narrowed(self, weights: int, ranks: int) -> int:
        """A rank's 16-bit cast of its float32 shard of `weights` weights, before the all-gather; 0 without a cast."""
        is_cast = self.states.kept_gradient_bytes > self.states.element_bytes
        return self.states.element_bytes * weights // ranks if is_cast else 0

    def prefetched(self, visit: LayerVisit | None) -> int:
        """Prefetched weights of the next layer of backward, beside the layer at work or (None) the loss."""
        if self.zero < 3 or (visit is not None and visit.is_first):
            return 0
        next_weights = self.stage.widest_dense if visit is None else visit.kind.weights - visit.kind.apart_weights
        return self.states.element_bytes * next_weights

    def previous_reduction(self, visit: LayerVisit | None) -> int:
        """The reduce-scatter buffer of the layer done before the one at work, or before the embedding (None)."""
        is_first_reduction = visit is not None and visit.is_last
        if not self.zero or is_first_reduction or self.sums_whole:
            return 0
        return self.states.reduced_gradient_bytes * self.stage.widest_dense

    def reduced_experts(self, visit: LayerVisit) -> int:
        """The shard that gradients of a layer's split experts are reduce-scattered into."""
        return self.states.reduced_gradient_bytes * visit.kind.apart_weights // self.expert_ranks

    def shards(self, weights: int) -> int:
        """Shards of the reduced gradients of `weights` weights."""
        return self.states.kept_gradient_bytes * weights // self.states.ranks
