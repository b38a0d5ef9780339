"""Working weights: what is made of the resident weights for forward and backward, and what making it takes.

One GPU, DDP and pipelines without ZeRO work with the resident weights; in fp8 each layer's codes (levers/fp8.py, the
weight as it is and transposed) are there from forward until its backward is done. So are the rounded copies that
quantization-aware training multiplies with (levers/fake_quantize.py); of layers that are computed again, only those of
the layer at work.

FSDP2 (parallel/data.py) gathers 16-bit weights from the shards, in groups: each layer, an untied embedding, and the
root (final norm, output projection, tied embedding, learned positions), which stays whole from forward to backward.

Experts that are split over expert ranks are a group apart from their layer's, gathered and reduced inside it.

- ZeRO-3: the root and the layer at work are whole, and the next layer's weights are on their way (prefetched).
- ZeRO-1 and 2: layers stay whole after forward too; in backward they are let go of one by one or, with several
  micro-batches, at the end of the last one's.
- An all-gather buffer stays until the next group is gathered; since torch 2.15 until that is about to be copied out.
- A layer's gradients are reduced from a buffer (float32 where masters are) that stays until the next layer's are.
- ZeRO-1 with several micro-batches sums whole gradients, which are reduced in the last backward alone.
"""

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.memory.formulas.fsdp2 import Fsdp2
from tightfit.memory.formulas.stage import LayerVisit, StageMemory
from tightfit.memory.formulas.states import States

CODE_BYTES = 2
"""Two fp8 codes a weight."""


class WorkingWeights:
    """Bytes beside the resident weights, at the moments of a step; without ZeRO, copies are all there is."""

    def __init__(
        self,
        layout: Layout,
        levers: Levers,
        stage: StageMemory,
        states: States,
        micro_batches: int,
        fsdp2: Fsdp2,
        *,
        rounds: bool,
    ) -> None:
        """Of a rank that has `micro_batches` a step; `rounds`: products are with rounded copies of the weights."""
        self.stage, self.states, self.fsdp2, self.zero = stage, states, fsdp2, layout.zero
        has_codes = not layout.zero and levers.matmul != "native"
        self.copy_bytes = CODE_BYTES if has_codes else states.element_bytes if rounds else 0
        """Of a layer's weight in the form that products use, beside the weight itself: fp8 codes, or a rounded copy."""
        self.copies_return = rounds and levers.checkpoint_every == 1
        """Whether layers make their copies again in backward, so that only those of the layer at work exist."""
        self.expert_ranks = max(1, states.ranks // layout.expert)
        """Of the ranks that share one copy of what ZeRO splits, those that share an expert's."""
        self.widest_buffered = stage.widest_dense if self.expert_ranks == 1 else stage.widest_group
        """Weights of the largest group that is gathered in a buffer: a rank that shares its experts with nobody needs
        none for them."""
        self.after_root = stage.embedding or stage.widest
        """Weights of the first group that is gathered after the root."""
        self.stays_gathered = layout.zero in (1, 2) and micro_batches > 1
        """Under ZeRO-1 and 2 weights stay whole from one micro-batch to the next."""
        self.sums_whole = layout.zero == 1 and micro_batches > 1
        """Under ZeRO-1 micro-batches add up whole gradients."""

        layers, widest = stage.layer_weights, stage.widest
        self.in_forward_bytes = self._held(copied=widest if self.copies_return else layers, at_work=widest)
        """When the last layer runs."""
        self.at_loss_bytes = self._held(copied=0 if self.copies_return else layers, at_work=0)
        """When the layers have run."""
        others = 0 if self.stays_gathered else stage.weights - stage.root
        self.at_embedding_bytes = self._held(copied=0, at_work=0, freed=others)
        """When all layers are done."""
        stays_to_end = self.stays_gathered and not self.sums_whole
        self.at_end_bytes = states.element_bytes * stage.weights if stays_to_end else 0
        """In FSDP2's last callback."""

    def _held(self, *, copied: int, at_work: int, freed: int = 0) -> int:
        """Copies of so many weights; of ZeRO-3 the root and the weights at work, of 1 and 2 all but those let go of."""
        if not self.zero:
            return self.copy_bytes * copied
        gathered = self.stage.root + at_work if self.zero == 3 else self.stage.weights - freed
        return self.copy_bytes * copied + self.states.element_bytes * gathered

    def at_layer(self, visit: LayerVisit) -> int:
        """While backward is at work in a layer."""
        not_done = self.stage.layer_weights - visit.done_weights
        return self._held(
            copied=self.stage.widest if self.copies_return else not_done,
            at_work=visit.kind.weights,
            freed=0 if self.stays_gathered else visit.done_weights,
        )

    def after_layer(self, visit: LayerVisit) -> int:
        """Once a layer (or its experts, where they are apart) has let go of its own."""
        own = visit.kind.apart_weights or visit.kind.weights
        done = visit.done_weights + own
        return self._held(
            copied=0 if self.copies_return else self.stage.layer_weights - done,
            at_work=visit.kind.weights - own,
            freed=0 if self.stays_gathered and not self.sums_whole else done,
        )

    def all_gather_buffer(self, earlier_gradient_bytes: int) -> int:
        """The buffer that FSDP2 gathers a group of weights into, in forward."""
        if not self.zero:
            return 0
        own_bytes = self.states.element_bytes * self.widest_buffered
        # Where weights stay gathered it is the first micro-batch's, which has no sums of gradients beside it.
        return max(0, own_bytes - (earlier_gradient_bytes if self.stays_gathered else 0))

    def gathering_buffers(self, earlier_gradient_bytes: int) -> int:
        """While a group is copied out of its all-gather buffer: this one, and that of the group before.

        Where that is gone by then, it is there until the group is gathered: the group's own buffer, which then is all
        there is of it, is counted as its weights.
        """
        own_bytes = self.all_gather_buffer(earlier_gradient_bytes)
        if not own_bytes:
            return 0
        before_bytes = self.states.element_bytes * self.stage.widest_dense
        if not self.fsdp2.frees_buffer_before_copy:
            return own_bytes + before_bytes
        ranks = self.states.ranks if self.expert_ranks == 1 else self.expert_ranks
        return before_bytes + self.narrowed(self.widest_buffered, ranks)

    def narrowed(self, weights: int, ranks: int) -> int:
        """A rank's shard in 16 bits, which goes into a buffer of so many weights, where shards are float32."""
        is_cast = self.states.kept_gradient_bytes > self.states.element_bytes
        return self.states.element_bytes * weights // ranks if is_cast else 0

    def prefetched(self, visit: LayerVisit | None) -> int:
        """On their way for the layer after the one at work in backward, or after the loss."""
        if self.zero < 3 or (visit is not None and visit.is_first):
            return 0
        next_weights = self.stage.widest_dense if visit is None else visit.kind.weights - visit.kind.apart_weights
        return self.states.element_bytes * next_weights

    def previous_reduction(self, visit: LayerVisit | None) -> int:
        """The buffer of the layer done before the one at work, or before the embedding."""
        is_first_reduction = visit is not None and visit.is_last
        if not self.zero or is_first_reduction or self.sums_whole:
            return 0
        return self.states.reduced_gradient_bytes * self.stage.widest_dense

    def reduced_experts(self, visit: LayerVisit) -> int:
        """Reduced gradients of a layer's experts where they are a group apart, when they are reduced."""
        return self.states.reduced_gradient_bytes * visit.kind.apart_weights // self.expert_ranks

    def shards(self, weights: int) -> int:
        """Reduced gradients of so many weights."""
        return self.states.kept_gradient_bytes * weights // self.states.ranks

    def before_cast(self, weights: int) -> int:
        """Reduced gradients of so many weights before they are cast to the dtype that is kept; 0 where none are."""
        reduced_bytes = self.states.reduced_gradient_bytes
        return reduced_bytes * weights // self.states.ranks if reduced_bytes > self.states.kept_gradient_bytes else 0
